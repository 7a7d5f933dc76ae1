// Expands a step's uploaded plan into the arrays that the step's kernels read.
//
// The first kernel is one CTA: it applies the plan's changes to the pool, then computes prefix sums of rows, samples
// and pages over the sequences, four sequences per thread. The second kernel fills the arrays of rows and pages.
#include <utility>

#include "device.cuh"

namespace baton {
namespace {

constexpr int THREADS = 1024;
constexpr int EACH = BATON_SEQUENCES_MAX / THREADS;
constexpr int TOKENS = BATON_BLOCK_TOKENS;

struct Sums {
  int rows;
  int samples;
  int pages;
};

__device__ inline Sums operator+(Sums a, Sums b) {
  return {a.rows + b.rows, a.samples + b.samples, a.pages + b.pages};
}
__device__ inline Sums shuffle_up(Sums x, int distance) {
  return {__shfl_up_sync(FULL, x.rows, distance), __shfl_up_sync(FULL, x.samples, distance),
          __shfl_up_sync(FULL, x.pages, distance)};
}

// Returns the sum over all previous threads.
__device__ Sums sum_before(Sums own, Sums* shared) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  Sums through = own;
  for (int distance = 1; distance < WARP; distance *= 2) {
    const Sums other = shuffle_up(through, distance);
    if (lane >= distance) through = through + other;
  }
  if (lane == WARP - 1) shared[warp] = through;
  __syncthreads();
  if (warp == 0) {
    Sums total = lane < blockDim.x / WARP ? shared[lane] : Sums{0, 0, 0};
    for (int distance = 1; distance < WARP; distance *= 2) {
      const Sums other = shuffle_up(total, distance);
      if (lane >= distance) total = total + other;
    }
    shared[lane] = total;
  }
  __syncthreads();
  const Sums before = {through.rows - own.rows, through.samples - own.samples, through.pages - own.pages};
  return warp == 0 ? before : before + shared[warp - 1];
}

// Returns the slot's row that a run writes to.
__device__ int32_t* row_of(const baton_pool& pool, const baton_plan_run& run) {
  const int64_t slot = run.slot;
  switch (run.target) {
    case BATON_RUN_TOKENS: return pool.tokens + slot * pool.token_width;
    case BATON_RUN_BLOCKS: return pool.block_tables + slot * pool.table_width;
    case BATON_RUN_STOPS: return pool.stop_tokens + slot * pool.stop_width;
    default: return pool.rules + slot * pool.rule_width;
  }
}

__device__ void apply_plan(const baton_pool& pool, const uint32_t* words, const baton_plan_header& header) {
  const auto* admissions = reinterpret_cast<const baton_plan_admission*>(words + header.admissions_at);
  for (uint32_t i = threadIdx.x; i < header.admission_count; i += THREADS) {
    pool.slots[admissions[i].slot] = admissions[i].state;
    pool.sampling[admissions[i].slot] = admissions[i].sampling;
    pool.adapters[admissions[i].slot] = admissions[i].adapter;
  }
  // One warp per run: most runs are one block id, a few are prompts.
  const auto* runs = reinterpret_cast<const baton_plan_run*>(words + header.runs_at);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = THREADS / WARP;
  constexpr int LONG = 512;
  for (uint32_t i = warp; i < header.run_count; i += warps) {
    const baton_plan_run run = runs[i];
    if (run.count > LONG) continue;
    int32_t* row = row_of(pool, run);
    for (int at = lane; at < run.count; at += WARP) row[run.first + at] = static_cast<int32_t>(words[run.at + at]);
  }
  // All warps process the long runs.
  for (uint32_t i = 0; i < header.run_count; ++i) {
    const baton_plan_run run = runs[i];
    if (run.count <= LONG) continue;
    int32_t* row = row_of(pool, run);
    for (int at = threadIdx.x; at < run.count; at += THREADS) {
      row[run.first + at] = static_cast<int32_t>(words[run.at + at]);
    }
  }
}

// Returns the sums of one sequence. Where `samples` or `rows` is above 0, it replaces the plan's number.
__device__ Sums sums_of(const baton_plan_sequence& sequence, int length, int samples, int rows) {
  return {rows > 0 ? rows : sequence.row_count, samples > 0 ? samples : sequence.sample_count,
          (length + TOKENS - 1) / TOKENS};
}

__global__ void __launch_bounds__(THREADS)
    plan_kernel(const baton_pool pool, const uint32_t* words, const baton_step step, int rows, int sequences,
                int samples, int tokens) {
  __shared__ Sums shared[WARP];
  __shared__ Sums whole;
  pdl_wait_and_release();
  const baton_plan_header header = *reinterpret_cast<const baton_plan_header*>(words);
  apply_plan(pool, words, header);
  __syncthreads();

  const auto* plan = reinterpret_cast<const baton_plan_sequence*>(words + header.sequences_at);
  const int count = static_cast<int>(header.sequence_count);
  baton_plan_sequence sequence[EACH];
  int length[EACH];
  Sums own = {0, 0, 0};
  for (int j = 0; j < EACH; ++j) {
    const int index = threadIdx.x * EACH + j;
    length[j] = 0;
    if (index < count) {
      sequence[j] = plan[index];
      baton_slot& slot = pool.slots[sequence[j].slot];
      length[j] = slot.position + sequence[j].row_count;
      if (tokens == 0) slot.position = length[j];
      slot.drafts = sequence[j].drafts;
    } else if (index < sequences) {
      sequence[j] = {-1, 1, 0, 0};
      length[j] = 1;
    } else {
      sequence[j] = {-1, 0, 0, 0};
    }
    own = own + sums_of(sequence[j], length[j], index < count ? tokens : 0, index < sequences ? tokens : 0);
  }
  Sums before = sum_before(own, shared);
  for (int j = 0; j < EACH; ++j) {
    const int index = threadIdx.x * EACH + j;
    if (index >= sequences) break;
    step.row_indptr[index] = before.rows;
    step.page_indptr[index] = before.pages;
    // With a length of 0, decode attention skips padding. Otherwise a CTA would process a page of each head.
    step.kv_lengths[index] = sequence[j].slot < 0 ? 0 : length[j];
    step.last_page_tokens[index] = (length[j] - 1) % TOKENS + 1;
    step.sequence_slots[index] = sequence[j].slot;
    const Sums sums = sums_of(sequence[j], length[j], index < count ? tokens : 0, tokens);
    for (int sample = 0; sample < sums.samples; ++sample) {
      const int to = before.samples + sample;
      const bool is_planned = sample < sequence[j].sample_count;
      step.sampled_rows[to] = before.rows + sums.rows - sums.samples + sample;
      step.sample_slots[to] = is_planned ? sequence[j].slot : -1;
      step.sample_masks[to] = -1;
      step.sample_adapters[to] = sequence[j].slot < 0 ? -1 : pool.adapters[sequence[j].slot];
    }
    before = before + sums;
    if (index == sequences - 1) {
      step.row_indptr[sequences] = before.rows;
      step.page_indptr[sequences] = before.pages;
      whole = before;
    }
  }
  __syncthreads();
  if (sequences == 0) {
    if (threadIdx.x == 0) {
      step.row_indptr[0] = step.page_indptr[0] = 0;
      whole = {0, 0, 0};
    }
    __syncthreads();
  }
  for (int i = whole.samples + threadIdx.x; i < samples; i += THREADS) {
    step.sampled_rows[i] = 0;
    step.sample_slots[i] = -1;
    step.sample_masks[i] = -1;
    step.sample_adapters[i] = -1;
  }
  if (threadIdx.x == 0) {
    const int padding = max(sequences - count, 0) * max(tokens, 1);
    step.counts[0] = count;
    step.counts[1] = whole.rows - padding;
    step.counts[2] = whole.samples;
    step.counts[3] = whole.pages - max(sequences - count, 0);
    step.counts[4] = static_cast<int32_t>(header.step_id);
    step.counts[5] = step.counts[6] = step.counts[7] = 0;
  }
}

// blockIdx.y is the sequence, blockIdx.z the KV group. The CTAs of a sequence share its rows and pages. The last y
// processes the rows that belong to no sequence.
__global__ void expand_kernel(const baton_pool pool, const baton_step step, int rows, int sequences, int verified) {
  pdl_wait_and_release();
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  const int trash = pool.trash_block * TOKENS;
  const int sequence = blockIdx.y, group = blockIdx.z, groups = gridDim.z;
  int32_t* const destinations = step.row_destinations + static_cast<int64_t>(group) * step.rows_max;
  int32_t* const page_indices = step.page_indices + static_cast<int64_t>(group) * step.pages_max;
  if (sequence == sequences) {
    for (int row = step.row_indptr[sequences] + thread; row < rows; row += threads) {
      destinations[row] = trash + row % TOKENS;
      if (group > 0) continue;
      step.row_tokens[row] = 0;
      step.row_positions[row] = 0;
      step.row_sequences[row] = -1;
      step.row_adapters[row] = -1;
    }
    return;
  }
  const int slot = step.sequence_slots[sequence];
  const int first_row = step.row_indptr[sequence], row_count = step.row_indptr[sequence + 1] - first_row;
  const int first_page = step.page_indptr[sequence], pages = step.page_indptr[sequence + 1] - first_page;
  // The position of a slot that verifies draft tokens is not advanced yet. Rows beyond its draft tokens write their KV
  // to the trash block. Padding sequences are at position 0.
  const int end = slot < 0 ? 1 : step.kv_lengths[sequence];
  const int first_position = slot < 0 ? 0 : verified == 0 ? end - row_count : pool.slots[slot].position;
  const int32_t* table = pool.block_tables + static_cast<int64_t>(slot) * pool.table_width + group;
  const int32_t* tokens = pool.tokens + static_cast<int64_t>(slot) * pool.token_width;
  for (int i = thread; i < row_count; i += threads) {
    const int position = min(first_position + i, end - 1);
    const bool has_place = slot >= 0 && first_position + i < end;
    const int block = has_place ? table[position / TOKENS * groups] : pool.trash_block;
    destinations[first_row + i] = block * TOKENS + position % TOKENS;
    if (group > 0) continue;
    step.row_tokens[first_row + i] = slot < 0 ? 0 : tokens[verified == 0 ? position : first_position];
    step.row_positions[first_row + i] = position;
    step.row_sequences[first_row + i] = sequence;
    step.row_adapters[first_row + i] = slot < 0 ? -1 : pool.adapters[slot];
  }
  // The table's entries behind the window are blocks of other sequences, or no blocks. Attention kernels do not load
  // these pages; the block of zeros keeps every address of the list valid.
  const int window = pool.windows[group];
  const int first_seen = window > 0 ? max(first_position + 1 - window, 0) / TOKENS : 0;
  for (int i = thread; i < pages; i += threads) {
    page_indices[first_page + i] =
        slot < 0 ? pool.trash_block : i < first_seen ? pool.zero_block : table[i * groups];
  }
}

__global__ void supply_kernel(const baton_pool pool, const int32_t* words, const baton_step step, int count) {
  pdl_wait_and_release();
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= count) return;
  const int sample = words[2 * index], mask = words[2 * index + 1];
  if (mask >= 0) {
    step.sample_masks[sample] = mask;
  } else {
    atomicSub(&pool.slots[step.sample_slots[sample]].position, 1);
    step.sample_slots[sample] = -1;
  }
}

}  // namespace

int32_t load_step() {
  BATON_TRY(load(plan_kernel));
  BATON_TRY(load(supply_kernel));
  return load(expand_kernel);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_step_prepare(const baton_pool* pool, const void* plan, const baton_step* step,
                                     int32_t rows, int32_t sequences, int32_t samples, int32_t tokens, void* stream) {
  return guarded([&] {
    BATON_REQUIRE(pool && plan && step, "pool, plan or step is null");
    auto within = [](const char* name, int32_t value, int32_t most) {
      BATON_REQUIRE(value >= 0 && value <= most, "%s is %d; expected 0 to %d", name, value, most);
      return static_cast<int32_t>(BATON_OK);
    };
    BATON_TRY(within("step.sequences_max", step->sequences_max, BATON_SEQUENCES_MAX));
    BATON_TRY(within("rows", rows, step->rows_max));
    BATON_TRY(within("sequences", sequences, step->sequences_max));
    BATON_TRY(within("samples", samples, step->samples_max));
    BATON_REQUIRE(pool->group_count > 0 && pool->group_count <= BATON_KV_GROUPS_MAX,
                  "pool.group_count is %d; expected 1 to %d", pool->group_count, BATON_KV_GROUPS_MAX);
    BATON_REQUIRE(rows >= sequences, "rows is %d; expected at least sequences, %d", rows, sequences);
    BATON_REQUIRE(tokens >= 0 && (tokens == 0 || (rows == sequences * tokens && samples == rows)),
                  "tokens is %d for %d rows, %d samples and %d sequences; expected 0, or as many rows and samples each",
                  tokens, rows, samples, sequences);
    BATON_TRY(launch("step plan", plan_kernel, dim3(1), dim3(THREADS), 0, as_stream(stream), *pool,
                     static_cast<const uint32_t*>(plan), *step, rows, sequences, samples, tokens));
    // Long sequences have hundreds of pages, prompts thousands of rows; decode steps need one CTA each.
    const int64_t each = (rows + sequences) / (sequences + 1) + step->pages_max / (step->sequences_max + 1);
    const int blocks = sequences >= 256 ? 1 : each > 2048 ? 8 : each > 256 ? 2 : 1;
    return launch("step rows", expand_kernel, dim3(blocks, sequences + 1, pool->group_count), dim3(256), 0,
                  as_stream(stream), *pool, *step, rows, sequences, tokens);
  });
}

BATON_API int32_t baton_step_supply(const baton_pool* pool, const void* words, const baton_step* step, int32_t count,
                                    void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(pool && words && step, "pool, words or step is null");
    BATON_REQUIRE(count >= 0 && count <= step->samples_max, "count is %d; expected 0 to %d", count, step->samples_max);
    if (count == 0) return BATON_OK;
    constexpr int SUPPLY_THREADS = 256;
    return launch("step supply", supply_kernel, dim3((count + SUPPLY_THREADS - 1) / SUPPLY_THREADS),
                  dim3(SUPPLY_THREADS), 0, as_stream(stream), *pool, static_cast<const int32_t*>(words), *step, count);
  });
}
