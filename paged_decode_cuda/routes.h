// The ways in which attention can run, as one list: the first that fits a problem takes it, the last fits always.
//
// A route is four functions. To add one, declare them in a header of its own and put an entry into the list in
// routes.cu:
//
//   const char* why_not(const Problem&, const DeviceLimits&)   "" when it fits, else what keeps the call from it
//   Plan        plan(const Problem&, const DeviceLimits&)      any type; arithmetic only, no CUDA
//   Numbers     numbers(const Plan&)                           the plan as explain() shows it
//   void        add(const Problem&, const Plan&, Launches&)    its kernels, with their workspace
#pragma once

#include <stdint.h>

#include <utility>
#include <vector>

#include "runtime.h"
#include "spec/problem.h"

namespace paged_attn {

using Numbers = std::vector<std::pair<const char*, int64_t>>;

struct Route {
  const char* name;
  const char* (*why_not)(const Problem&, const DeviceLimits&);
  Numbers (*numbers)(const Problem&, const DeviceLimits&);
  void (*add)(const Problem&, Launches&);
};

template <auto kWhyNot, auto kPlan, auto kNumbers, auto kAdd>
constexpr Route make_route(const char* name) {
  return {name, kWhyNot, [](const Problem& p, const DeviceLimits& limits) { return kNumbers(kPlan(p, limits)); },
          [](const Problem& p, Launches& launches) { kAdd(p, kPlan(p, launches.limits()), launches); }};
}

// The list, ended by a route without a name.
extern const Route kRoutes[];

// The first route that fits.
const Route& find_route(const Problem& p, const DeviceLimits& limits);

}  // namespace paged_attn
