// Paged decode attention by FlashInfer's CUDA-core kernel, for one head dimension.
#include <cuda_bf16.h>

#include <vector>

#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/variants.cuh>

#include "flash.h"

namespace baton {
namespace {

namespace fi = flashinfer;
using Element = __nv_bfloat16;
using Params = fi::BatchDecodeParams<Element, Element, Element, int32_t>;
constexpr auto NO_ROPE = fi::PosEncodingMode::kNone;
template <bool WINDOW>
using Variant = fi::DefaultAttention<false, WINDOW, false, false>;

}  // namespace

// The plan does not depend on the window, so the kernel also reads chunks before the window and masks them.
template <int DIM>
int32_t FlashDecode<DIM>::prepare(const FlashPrepare& in) {
  const auto& shape = *in.shape;
  const auto& work = *in.workspace;
  fi::DecodePlanInfo info;
  cudaError_t error = cudaSuccess;
  DISPATCH_GQA_GROUP_SIZE(shape.query_heads / shape.kv_heads, GROUP, {
    auto estimate =
        fi::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<GROUP, DIM, NO_ROPE, Variant<false>, Params>;
    error = fi::DecodePlan<DIM, NO_ROPE, Variant<false>, Params>(
        work.floats, work.float_bytes, work.ints, work.pinned_host, work.int_bytes, info,
        const_cast<int32_t*>(in.batch->page_indptr_host), in.batch->sequences, shape.query_heads,
        BATON_BLOCK_TOKENS, in.batch->is_graph != 0, in.stream, estimate);
  });
  BATON_TRY(check(error, "planning decode attention"));
  return keep_plan(info.ToVector(), BATON_ATTENTION_DECODE, *in.plan);
}

template <int DIM>
int32_t FlashDecode<DIM>::run(const FlashRun& in) {
  fi::DecodePlanInfo info;
  info.FromVector({in.plan->words, in.plan->words + in.plan->word_count});
  const int64_t strides[3] = {in.kv->block_elements, BATON_BLOCK_TOKENS * DIM, DIM};
  fi::paged_kv_t<Element, int32_t> pages(in.kv->head_count, BATON_BLOCK_TOKENS, DIM, in.sequences,
                                         fi::QKVLayout::kHND, static_cast<Element*>(in.keys),
                                         static_cast<Element*>(in.values), strides, in.step->page_indices,
                                         in.step->page_indptr, in.step->last_page_tokens);
  Params params;
  params.q = static_cast<Element*>(const_cast<void*>(in.queries));
  params.paged_kv = pages;
  params.o = static_cast<Element*>(in.out);
  params.lse = nullptr;
  params.num_qo_heads = in.shape->query_heads;
  params.q_stride_n = static_cast<int32_t>(in.query_stride);
  params.q_stride_h = DIM;
  params.window_left = in.shape->window - 1;
  params.sm_scale = in.shape->scale;
  params.rope_rcp_scale = params.rope_rcp_theta = 1.f;

  auto ints = [&](int64_t offset) { return fi::GetPtrFromBaseOffset<int32_t>(in.workspace->ints, offset); };
  params.request_indices = ints(info.request_indices_offset);
  params.kv_tile_indices = ints(info.kv_tile_indices_offset);
  params.o_indptr = ints(info.o_indptr_offset);
  params.kv_chunk_size_ptr = ints(info.kv_chunk_size_ptr_offset);
  params.padded_batch_size = static_cast<uint32_t>(info.padded_batch_size);
  Element* partial_values = nullptr;
  float* partial_sums = nullptr;
  if (info.split_kv) {
    partial_values = fi::GetPtrFromBaseOffset<Element>(in.workspace->floats, info.v_offset);
    partial_sums = fi::GetPtrFromBaseOffset<float>(in.workspace->floats, info.s_offset);
    if (info.enable_cuda_graph) {
      params.block_valid_mask =
          fi::GetPtrFromBaseOffset<bool>(in.workspace->ints, info.block_valid_mask_offset);
    }
  }
  const cudaError_t error =
      in.shape->window > 0
          ? fi::BatchDecodeWithPagedKVCacheDispatched<DIM, NO_ROPE, Variant<true>, Params>(
                params, partial_values, partial_sums, false, in.stream)
          : fi::BatchDecodeWithPagedKVCacheDispatched<DIM, NO_ROPE, Variant<false>, Params>(
                params, partial_values, partial_sums, false, in.stream);
  return check(error, "decode attention");
}

template struct FlashDecode<BATON_HEAD_DIM>;

}  // namespace baton
