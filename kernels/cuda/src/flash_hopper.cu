// Paged causal attention by FlashInfer's FA3 kernels (wgmma, only compute capability 9.0), for one head
// dimension. Compiled for sm_90a only.
#include <cuda_bf16.h>

#include <vector>

#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/hopper/default_params.cuh>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variants.cuh>
#include <flashinfer/cutlass_utils.cuh>

#include "flash.h"

namespace baton {
namespace {

namespace fi = flashinfer;
using Element = cutlass::bfloat16_t;
using Params = fi::BatchPrefillPagedParams<Element, Element, Element, int32_t>;

template <int DIM, bool SAME_SCHEDULE>
cudaError_t launch(Params& params, cudaStream_t stream) {
  return fi::BatchPrefillWithPagedKVCacheDispatched<DIM, DIM, fi::MaskMode::kCausal,
                                                    /*LEFT_SLIDING_WINDOW=*/false, SAME_SCHEDULE,
                                                    fi::StandardAttention, Params>(params, /*enable_pdl=*/false,
                                                                                   stream);
}

}  // namespace

template <int DIM>
int32_t FlashHopper<DIM>::prepare(const FlashPrepare& in) {
  const auto& shape = *in.shape;
  const auto& work = *in.workspace;
  fi::PrefillPlanSM90Info info;
  const cudaError_t error = fi::PrefillSM90Plan<int32_t>(
      work.floats, work.float_bytes, work.ints, work.pinned_host, work.int_bytes, info,
      const_cast<int32_t*>(in.batch->row_indptr_host), const_cast<int32_t*>(in.batch->page_indptr_host),
      const_cast<int32_t*>(in.batch->kv_lengths_host), in.batch->rows, in.batch->sequences, shape.query_heads,
      shape.kv_heads, DIM, DIM, BATON_BLOCK_TOKENS, /*causal=*/true, /*enable_cuda_graph=*/false,
      sizeof(Element), in.stream);
  BATON_TRY(check(error, "planning FA3 attention"));
  return keep_plan(info.ToVector(), BATON_ATTENTION_FA3, *in.plan);
}

template <int DIM>
int32_t FlashHopper<DIM>::run(const FlashRun& in) {
  fi::PrefillPlanSM90Info info;
  info.FromVector({in.plan->words, in.plan->words + in.plan->word_count});
  Params params = {};
  params.q_ptr = static_cast<Element*>(const_cast<void*>(in.queries));
  params.k_ptr = static_cast<Element*>(in.keys);
  params.v_ptr = static_cast<Element*>(in.values);
  params.o_ptr = static_cast<Element*>(in.out);
  params.lse_ptr = in.sums;
  params.q_stride_n = in.query_stride;
  params.q_stride_h = DIM;
  params.o_stride_n = static_cast<int64_t>(in.shape->query_heads) * DIM;
  params.o_stride_h = DIM;
  params.k_stride_n = params.v_stride_n = DIM;
  params.k_stride_h = params.v_stride_h = BATON_BLOCK_TOKENS * DIM;
  params.k_page_stride = params.v_page_stride = in.kv->block_elements;
  params.nnz_qo = in.rows;
  params.num_qo_heads = in.shape->query_heads;
  params.num_kv_heads = in.shape->kv_heads;
  params.group_size = in.shape->query_heads / in.shape->kv_heads;
  params.page_size = BATON_BLOCK_TOKENS;
  params.window_left = -1;
  params.causal = true;
  params.kv_indices = in.step->page_indices;
  params.additional_params.sm_scale = in.shape->scale;

  auto ints = [&](int64_t offset) { return fi::GetPtrFromBaseOffset<int32_t>(in.workspace->ints, offset); };
  params.qo_tile_indices = ints(info.qo_tile_indices_offset);
  params.qo_indptr = ints(info.qo_indptr_offset);
  params.kv_indptr = ints(info.kv_indptr_offset);
  params.qo_lens = ints(info.qo_len_offset);
  params.kv_lens = ints(info.kv_len_offset);
  params.head_indices = ints(info.head_indices_offset);
  params.work_indptr = ints(info.work_indptr_offset);
  params.batch_indices = ints(info.batch_indices_offset);
  const cudaError_t error = info.same_schedule_for_all_heads ? launch<DIM, true>(params, in.stream)
                                                             : launch<DIM, false>(params, in.stream);
  return check(error, "FA3 attention");
}

template struct FlashHopper<BATON_HEAD_DIM>;

}  // namespace baton
