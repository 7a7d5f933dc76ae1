// Paged causal attention of any number of rows by FlashInfer's FA2 kernels (mma, Ampere and later), for one
// head dimension.
#include <cuda_bf16.h>

#include <vector>

#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/attention/mask.cuh>

#include "flash.h"

namespace baton {
namespace {

namespace fi = flashinfer;
using Element = __nv_bfloat16;
using Params = fi::BatchPrefillPagedParams<Element, Element, Element, int32_t>;

template <int DIM, bool WINDOW>
cudaError_t launch(const fi::PrefillPlanInfo& info, Params& params, Element* partial_values,
                   float* partial_sums, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  DISPATCH_CTA_TILE_Q(info.cta_tile_q, TILE, {
    error = fi::BatchPrefillWithPagedKVCacheDispatched<TILE, DIM, DIM, fi::PosEncodingMode::kNone,
                                                       /*USE_FP16_QK_REDUCTION=*/false, fi::MaskMode::kCausal,
                                                       fi::DefaultAttention<false, WINDOW, false, false>, Params>(
        params, partial_values, partial_sums, /*enable_pdl=*/false, stream);
  });
  return error;
}

}  // namespace

template <int DIM>
int32_t FlashPrefill<DIM>::prepare(const FlashPrepare& in) {
  const auto& shape = *in.shape;
  const auto& work = *in.workspace;
  fi::PrefillPlanInfo info;
  const cudaError_t error = fi::PrefillPlan<int32_t>(
      work.floats, work.float_bytes, work.ints, work.pinned_host, work.int_bytes, info,
      const_cast<int32_t*>(in.batch->row_indptr_host), const_cast<int32_t*>(in.batch->page_indptr_host),
      in.batch->rows, in.batch->sequences, shape.query_heads, shape.kv_heads, DIM, DIM, BATON_BLOCK_TOKENS,
      /*enable_cuda_graph=*/false, sizeof(Element), /*window_left=*/shape.window - 1, /*fixed_split_size=*/-1,
      /*disable_split_kv=*/false, /*num_colocated_ctas=*/0, in.stream);
  BATON_TRY(check(error, "planning FA2 attention"));
  return keep_plan(info.ToVector(), BATON_ATTENTION_FA2, *in.plan);
}

template <int DIM>
int32_t FlashPrefill<DIM>::run(const FlashRun& in) {
  fi::PrefillPlanInfo info;
  info.FromVector({in.plan->words, in.plan->words + in.plan->word_count});
  const int64_t strides[3] = {in.kv->block_elements, BATON_BLOCK_TOKENS * DIM, DIM};
  fi::paged_kv_t<Element, int32_t> pages(in.kv->head_count, BATON_BLOCK_TOKENS, DIM, in.sequences,
                                         fi::QKVLayout::kHND, static_cast<Element*>(in.keys),
                                         static_cast<Element*>(in.values), strides, in.step->page_indices,
                                         in.step->page_indptr, in.step->last_page_tokens);
  Params params;
  params.q = static_cast<Element*>(const_cast<void*>(in.queries));
  params.paged_kv = pages;
  params.q_indptr = in.step->row_indptr;
  params.o = static_cast<Element*>(in.out);
  params.lse = in.sums;
  params.num_qo_heads = in.shape->query_heads;
  params.group_size = fi::uint_fastdiv(in.shape->query_heads / in.shape->kv_heads);
  params.q_stride_n = static_cast<int32_t>(in.query_stride);
  params.q_stride_h = DIM;
  params.window_left = in.shape->window - 1;
  params.sm_scale = in.shape->scale;
  params.rope_rcp_scale = params.rope_rcp_theta = 1.f;

  auto ints = [&](int64_t offset) { return fi::GetPtrFromBaseOffset<int32_t>(in.workspace->ints, offset); };
  params.request_indices = ints(info.request_indices_offset);
  params.qo_tile_indices = ints(info.qo_tile_indices_offset);
  params.kv_tile_indices = ints(info.kv_tile_indices_offset);
  params.o_indptr = ints(info.o_indptr_offset);
  params.kv_chunk_size_ptr = ints(info.kv_chunk_size_ptr_offset);
  params.padded_batch_size = static_cast<uint32_t>(info.padded_batch_size);
  params.max_total_num_rows = static_cast<uint32_t>(info.total_num_rows);
  Element* partial_values = nullptr;
  float* partial_sums = nullptr;
  if (info.split_kv) {
    params.merge_indptr = ints(info.merge_indptr_offset);
    partial_values = fi::GetPtrFromBaseOffset<Element>(in.workspace->floats, info.v_offset);
    partial_sums = fi::GetPtrFromBaseOffset<float>(in.workspace->floats, info.s_offset);
  }
  const cudaError_t error = in.shape->window > 0
                                ? launch<DIM, true>(info, params, partial_values, partial_sums, in.stream)
                                : launch<DIM, false>(info, params, partial_values, partial_sums, in.stream);
  return check(error, "FA2 attention");
}

template struct FlashPrefill<BATON_HEAD_DIM>;

}  // namespace baton
