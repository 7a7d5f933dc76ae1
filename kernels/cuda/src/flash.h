// FlashInfer's attention as the dispatcher (attention.cu) sees it: one class per kind, with one instance per head
// dimension. Each instance has its own translation unit (BATON_HEAD_DIM), because the instances compile slowly.
#pragma once

#include "status.h"

namespace baton {

// Arguments of a launch.
struct FlashRun {
  const baton_attention_plan* plan;
  const baton_attention_shape* shape;
  const baton_attention_workspace* workspace;
  const baton_kv* kv;
  const baton_step* step;
  const void* queries;
  int64_t query_stride;
  void* out;
  void* keys;    // of the layer, in block 0
  void* values;  // likewise
  int32_t sequences;
  int32_t rows;
  float* sums;  // null, or base-2 logarithms of the softmax sums [rows][query_heads], to be written
  cudaStream_t stream;
};

struct FlashPrepare {
  const baton_attention_shape* shape;
  const baton_attention_batch* batch;
  const baton_attention_workspace* workspace;
  baton_attention_plan* plan;
  cudaStream_t stream;
};

#define BATON_FLASH_KIND(Name)                      \
  template <int DIM>                                \
  struct Name {                                     \
    static int32_t prepare(const FlashPrepare& in); \
    static int32_t run(const FlashRun& in);         \
  };
BATON_FLASH_KIND(FlashPrefill)
BATON_FLASH_KIND(FlashHopper)
#undef BATON_FLASH_KIND

// FlashInfer's plans are vectors of int64; Baton's plan is a plain value.
template <class Words>
int32_t keep_plan(const Words& words, int32_t kind, baton_attention_plan& plan) {
  constexpr size_t capacity = sizeof(plan.words) / sizeof(plan.words[0]);
  if (words.size() > capacity) return fail(BATON_UNSUPPORTED, "a plan of %zu words", words.size());
  plan = {};
  plan.kind = kind;
  plan.word_count = static_cast<int32_t>(words.size());
  for (size_t i = 0; i < words.size(); ++i) plan.words[i] = words[i];
  return BATON_OK;
}

}  // namespace baton
