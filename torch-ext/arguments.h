// The arguments of the operators. Their order is written once, in the tables below: schemas, the functions that
// torch calls and the Python package (which reads the schemas) follow it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace paged_attn {

using torch::stable::Tensor;

// Of flash_attn_with_kvcache and its variants. Shapes and meaning: paged_attn/attention.py. A tensor that was left out
// is nullptr; the others live as long as the call.
struct AttendArguments {
  const Tensor *q, *k_cache, *v_cache, *out, *lse, *cache_seqlens, *block_table;
  double softmax_scale;
  int64_t window_right = -1;
  const Tensor *k, *v;
  int64_t window_left = -1, max_seqlen_q = 0, max_seqlen_k = -1;
  const Tensor *cu_seqlens_q, *cu_seqlens_k, *cu_seqlens_k_new;
  double softcap = 0.0;
  int64_t num_splits = 0;
  bool deterministic = false;
  const Tensor *cache_batch_idx, *cache_leftpad, *alibi_slopes, *sinks;
  int64_t attention_chunk = 0;
  const Tensor *qv, *q_descale, *k_descale, *v_descale, *rotary_cos, *rotary_sin;
  bool rotary_interleaved = true;
  const Tensor* rotary_seqlens;
};

struct WriteArguments {
  const Tensor *k, *v, *k_cache, *v_cache;
  const Tensor *block_table, *cache_seqlens, *cu_seqlens_k_new, *slot_mapping, *k_descale, *v_descale;
};

// Of merge_parts: the results of the same queries over disjoint sets of keys, [parts, tokens, heads, head_dim] and
// [parts, tokens, heads, 1], and the union.
struct MergeArguments {
  const Tensor *parts, *part_lse, *out, *lse;
};

// Of merge_with_peers: this rank's result, [tokens, heads, head_dim] and [tokens, heads, 1], how many calls have used
// each row of the exchange memory, the union, of all heads or of this rank's share, and the memory of every rank, [2,
// ranks, rows, row_pairs, 2].
struct PeerMergeArguments {
  const Tensor *part, *part_lse, *calls, *out, *lse;
  std::vector<Tensor> memory_of_ranks;
  int64_t rank = 0;
};

// One argument: how the schema writes it, the field that it fills, and the type in which torch passes it.
template <typename Passed, typename Arguments, typename Field>
struct Argument {
  const char* schema;
  Field Arguments::* field;
};

// Scalars are passed as they are kept.
template <typename Arguments, typename Field>
constexpr Argument<Field, Arguments, Field> scalar(const char* schema, Field Arguments::* field) {
  return {schema, field};
}

template <typename Arguments>
using TensorField = const Tensor* Arguments::*;

template <typename Arguments>
constexpr Argument<Tensor, Arguments, const Tensor*> required(const char* schema, TensorField<Arguments> field) {
  return {schema, field};
}

template <typename Arguments>
constexpr Argument<std::optional<Tensor>, Arguments, const Tensor*> optional(const char* schema,
                                                                             TensorField<Arguments> field) {
  return {schema, field};
}

// The dispatcher takes 0.05 to 0.25 us for each argument, which counts in a decode step of a short context. So the most
// used arguments come first, and a plain call passes the first kPlainArguments alone. An int that changes from call to
// call is a SymInt: torch.compile makes a new graph for every value of an int.
using A = AttendArguments;
constexpr auto kAttendArguments = std::make_tuple(
    required("Tensor q", &A::q), required("Tensor(a!) k_cache", &A::k_cache),
    required("Tensor(b!) v_cache", &A::v_cache), required("Tensor(c!) out", &A::out),
    optional("Tensor(d!)? lse", &A::lse), optional("Tensor? cache_seqlens", &A::cache_seqlens),
    optional("Tensor? block_table", &A::block_table), scalar("float softmax_scale", &A::softmax_scale),
    scalar("int window_right=-1", &A::window_right), optional("Tensor? k=None", &A::k),
    optional("Tensor? v=None", &A::v), scalar("int window_left=-1", &A::window_left),
    scalar("SymInt max_seqlen_q=0", &A::max_seqlen_q), scalar("int max_seqlen_k=-1", &A::max_seqlen_k),
    optional("Tensor? cu_seqlens_q=None", &A::cu_seqlens_q), optional("Tensor? cu_seqlens_k=None", &A::cu_seqlens_k),
    optional("Tensor? cu_seqlens_k_new=None", &A::cu_seqlens_k_new), scalar("float softcap=0.0", &A::softcap),
    scalar("int num_splits=0", &A::num_splits), scalar("bool deterministic=False", &A::deterministic),
    optional("Tensor? cache_batch_idx=None", &A::cache_batch_idx),
    optional("Tensor? cache_leftpad=None", &A::cache_leftpad), optional("Tensor? alibi_slopes=None", &A::alibi_slopes),
    optional("Tensor? s_aux=None", &A::sinks), scalar("int attention_chunk=0", &A::attention_chunk),
    optional("Tensor? qv=None", &A::qv), optional("Tensor? q_descale=None", &A::q_descale),
    optional("Tensor? k_descale=None", &A::k_descale), optional("Tensor? v_descale=None", &A::v_descale),
    optional("Tensor? rotary_cos=None", &A::rotary_cos), optional("Tensor? rotary_sin=None", &A::rotary_sin),
    scalar("bool rotary_interleaved=True", &A::rotary_interleaved),
    optional("Tensor? rotary_seqlens=None", &A::rotary_seqlens));

constexpr size_t kAllArguments = std::tuple_size_v<decltype(kAttendArguments)>;
constexpr size_t kPlainArguments = 9;

using W = WriteArguments;
constexpr auto kWriteArguments = std::make_tuple(
    required("Tensor k", &W::k), required("Tensor v", &W::v), required("Tensor(a!) k_cache", &W::k_cache),
    required("Tensor(b!) v_cache", &W::v_cache), optional("Tensor? block_table", &W::block_table),
    optional("Tensor? cache_seqlens", &W::cache_seqlens),
    optional("Tensor? cu_seqlens_k_new=None", &W::cu_seqlens_k_new),
    optional("Tensor? slot_mapping=None", &W::slot_mapping), optional("Tensor? k_descale=None", &W::k_descale),
    optional("Tensor? v_descale=None", &W::v_descale));

using M = MergeArguments;
constexpr auto kMergeArguments =
    std::make_tuple(required("Tensor parts", &M::parts), required("Tensor part_lse", &M::part_lse),
                    required("Tensor(c!) out", &M::out), optional("Tensor(d!)? lse=None", &M::lse));

using P = PeerMergeArguments;
constexpr auto kPeerMergeArguments = std::make_tuple(
    required("Tensor part", &P::part), required("Tensor part_lse", &P::part_lse),
    required("Tensor(a!) calls", &P::calls), required("Tensor(c!) out", &P::out), optional("Tensor(d!)? lse", &P::lse),
    scalar("Tensor(b!)[] memory_of_ranks", &P::memory_of_ranks), scalar("int rank", &P::rank));

// What an operator changes, of the tensors that its table marks: (a!) and (b!) are the caches (or a count of
// calls and the memory of ranks), (c!) and (d!) the results.
enum class Changes { kNothing, kResults, kAll };

// "name(arguments) -> returned" for the first `count` arguments of a table. Tensors that the operator does not change
// lose their mark, such as (a!).
template <typename Table>
std::string schema_of(const char* name, const Table& table, size_t count, Changes changes, const char* returned) {
  std::string schema = std::string(name) + "(";
  const auto add = [&](std::string text) {
    const size_t mark = text.find('(');
    if (mark != std::string::npos &&
        (changes == Changes::kNothing || (changes == Changes::kResults && text[mark + 1] < 'c')))
      text.erase(mark, 4);
    schema += (schema.back() == '(' ? "" : ", ") + text;
  };
  std::apply(
      [&](const auto&... a) {
        size_t i = 0;
        ((i++ < count ? add(a.schema) : void()), ...);
      },
      table);
  return schema + ") -> " + returned;
}

inline void set_field(const Tensor** field, const Tensor& passed) { *field = &passed; }
inline void set_field(const Tensor** field, const std::optional<Tensor>& passed) {
  *field = passed ? &*passed : nullptr;
}
template <typename Scalar>
void set_field(Scalar* field, const Scalar& passed) {
  *field = passed;
}

// call() is what torch boxes: it takes the first arguments of a table, one by one, and calls kFunction(arguments).
template <const auto& kTable, auto kFunction, typename Indices>
struct Operator;

template <const auto& kTable, auto kFunction, size_t... kI>
struct Operator<kTable, kFunction, std::index_sequence<kI...>> {
  template <typename Passed, typename Arguments, typename Field>
  static Passed passed_of(const Argument<Passed, Arguments, Field>&);
  template <typename Passed, typename Arguments, typename Field>
  static Arguments owner_of(const Argument<Passed, Arguments, Field>&);

  static auto call(decltype(passed_of(std::get<kI>(kTable)))... passed) {
    decltype(owner_of(std::get<0>(kTable))) arguments = {};
    (set_field(&(arguments.*std::get<kI>(kTable).field), passed), ...);
    return kFunction(arguments);
  }
};

}  // namespace paged_attn
