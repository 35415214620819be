// spec/ for Python, and the module itself.
#include "module.h"
#include "spec/check_tables.h"
#include "spec/ranges.h"
#include "spec/request.h"
#include "spec/state.h"

namespace paged_attn {
static float pd_tanh(float x) { return tanhf(x); }
}  // namespace paged_attn

#include "spec/score.h"

using namespace paged_attn;

void bind_spec(py::module_& m) {
  m.def("visible_keys", [](int64_t q_pos, int64_t kv_len, int64_t leftpad, int64_t left, int64_t right, int64_t chunk) {
    const KvRange r = visible_keys(q_pos, kv_len, leftpad, left, right, chunk);
    return py::make_tuple(r.begin, r.end);
  });
  m.def("split_keys", [](int64_t begin, int64_t end, int64_t split, int64_t splits, int64_t align) {
    const KvRange r = split_keys({begin, end}, split, splits, align);
    return py::make_tuple(r.begin, r.end);
  });
  m.def("score", [](float qk, float scale, float softcap, float slope, float distance) {
    return pd_score(qk, scale, softcap, slope, distance);
  });
  m.def("rescale", &pd_rescale);
  m.def("add_sink", [](float sink, float m, float l) {
    float factor = 0.f;
    pd_add_sink(sink, &m, &l, &factor);
    return py::make_tuple(m, l, factor);
  });
  m.def("lse", &pd_lse);
  m.def("normalizer", &pd_normalizer);
  m.def("with_v_descale", &pd_with_v_descale);
  m.def("request", [](const py::dict& d, int64_t b) {
    Made made;
    fill(made, d);
    const Request r = request_of(made.p, b);
    py::dict result;
    result["q_begin"] = r.q_begin;
    result["q_len"] = r.q_len;
    result["old_len"] = r.old_len;
    result["new_begin"] = r.new_begin;
    result["new_len"] = r.new_len;
    result["kv_len"] = r.kv_len;
    result["leftpad"] = r.leftpad;
    return result;
  });
  m.def("slot_of_key", [](const py::dict& d, int64_t b, int64_t key) {
    Made made;
    fill(made, d);
    const Slot s = slot_of_key(made.p.cache, b, key);
    return py::make_tuple(s.page, s.slot);
  });
  m.def("keys_of_tokens", [](const py::dict& d, int64_t b, int64_t begin, int64_t end) {
    Made made;
    fill(made, d);
    const KvRange r = keys_of_tokens(made.p, request_of(made.p, b), begin, end);
    return py::make_tuple(r.begin, r.end);
  });
  m.def("check_values", [](const py::dict& d) {
    Made made;
    fill(made, d);
    check_values(made.p);
    check_new_places(made.p);
  });
}

PYBIND11_MODULE(paged_attn_native, m) {
  py::module_ spec = m.def_submodule("spec"), cpu = m.def_submodule("cpu"), metal = m.def_submodule("metal"),
              scratch = m.def_submodule("scratch");
  bind_spec(spec);
  bind_cpu(cpu);
  bind_scratch(scratch);
  bind_metal(metal);
}
