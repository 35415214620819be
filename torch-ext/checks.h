// Shape checks with symbolic sizes: a Dim takes the size it meets first and compares it from then
// on, so one line is both the shape comment and the check.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

namespace [[gnu::visibility("hidden")]] paged_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

inline std::string str(int64_t x) { return std::to_string(x); }

inline const char* str(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Double: return "float64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Float8_e4m3fnuz: return "float8_e4m3fnuz";
    case ScalarType::Float8_e5m2fnuz: return "float8_e5m2fnuz";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    default: return "another dtype";
  }
}

inline std::string shape_str(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + str(t.size(i));
  return std::string(str(t.scalar_type())) + " " + s + "]";
}

struct Dim {
  const char* name;
  const char* origin = nullptr;  // the tensor that fixed the size; nullptr: still free
  int64_t size = 0;

  explicit Dim(const char* dim_name) : name(dim_name) {}
  Dim(const char* dim_name, int64_t fixed, const char* from) : name(dim_name), origin(from), size(fixed) {}

  std::string describe() const {
    return origin ? std::string(name) + " = " + str(size) + " (from " + origin + ")" : std::string(name);
  }
};

// The tensor that fixes the device of a call (and the dtype of much of it).
struct Like {
  const char* name;
  ScalarType dtype;
  torch::stable::Device device;

  Like(const Tensor& t, const char* tensor_name) : name(tensor_name), dtype(t.scalar_type()), device(t.device()) {}
};

inline void check_device(const Tensor& t, const char* name, const Like& like) {
  if (t.device() != like.device)
    fail(std::string(name) + ": expected a tensor on the device of " + like.name + ", got one on another device");
}

// Whether the elements of the last dimension lie apart: then no row can be read at once.
inline bool has_gaps(const Tensor& t) {
  const int64_t dims = t.dim();
  return dims > 0 && t.size(dims - 1) > 1 && t.stride(dims - 1) != 1 && t.numel() > 0;
}

// Checks dtype, shape, a contiguous last dimension and the device. Other dimensions may have any stride, 0 too.
inline void check(const Tensor& t, const char* name, std::initializer_list<ScalarType> dtypes,
                  std::initializer_list<Dim*> shape, const Like& like) {
  bool ok = false;
  const ScalarType dtype = t.scalar_type();
  for (ScalarType type : dtypes) ok |= dtype == type;
  ok = ok && t.dim() == static_cast<int64_t>(shape.size());
  int64_t i = 0;
  for (Dim* dim : shape) {
    if (!ok) break;
    if (!dim->origin) {
      dim->origin = name;
      dim->size = t.size(i);
    }
    ok = t.size(i++) == dim->size;
  }
  if (!ok) {
    std::string expected;
    for (ScalarType type : dtypes) expected += (expected.empty() ? "" : " or ") + std::string(str(type));
    expected += " [";
    for (Dim* const* dim = shape.begin(); dim != shape.end(); ++dim)
      expected += (dim == shape.begin() ? "" : ", ") + (*dim)->describe();
    fail(std::string(name) + ": expected " + expected + "], got " + shape_str(t));
  }
  if (has_gaps(t))
    fail(std::string(name) + ": expected a contiguous last dimension (stride 1), got stride " +
         str(t.stride(t.dim() - 1)));
  check_device(t, name, like);
}

}  // namespace paged_attn
