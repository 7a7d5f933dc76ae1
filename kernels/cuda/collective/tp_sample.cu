// Tensor-parallel sampling: each rank has the logits of its vocabulary shard, and all ranks choose the token that
// ../src/sample.cu chooses from the whole row, bitwise. Logits are not gathered.
//
// The kernels of sample.cuh process the rank's slices and store the results at these slices' places in the scratch.
// Between them, the kernels here add the other ranks' results, and the next kernel works as if the row were whole:
//   1. after `survey`, always: the summaries of the slices. Greedy rows are then complete.
//   2. after `weigh`: the earliest arrival of each slice, the runs' totals (each from one rank, added in the order of
//      the row), and for every bin of likelihood the number of its tokens and the sum of their distances, as
//      integers.
//   3. after `gather`, top-k and top-p: the number of tokens each rank has listed, and then these tokens; without a
//      list (NO_LIST, see sample.cuh), each rank's part of the row. Only such rows have their logits gathered; their
//      results have `detail` 1.
//   4. after `choose`, log-probabilities: the chosen token's logit, and each rank's greatest logits.
//
// The length of a row's message follows from `needs` and from values that are equal on all ranks.
#include "exchange.cuh"
#include "sample_weights.cuh"

namespace baton {

int32_t load_tp_sample();

namespace {

using namespace collective;
using namespace sampling;

static_assert(RANKS_MAX == GROUP_MAX);

// Contiguous words in the scratch of every rank.
struct Span {
  uint32_t* at;
  int words;
};
template <class T>
__device__ __forceinline__ Span span(T* at, int count) {
  return {reinterpret_cast<uint32_t*>(at), count * static_cast<int>(sizeof(T) / 4)};
}

template <class T>
__device__ __forceinline__ Span span_of_slices(const Arguments& in, int rank, T* of_row) {
  const int first = in.shares.slices[rank];
  return span(of_row + first, in.shares.slices[rank + 1] - first);
}
__device__ __forceinline__ Span span_of_runs(const Arguments& in, int rank, float* of_row) {
  const int first = in.shares.firsts[rank] / RUN;
  return span(of_row + first, (in.shares.firsts[rank + 1] + RUN - 1) / RUN - first);
}
__device__ __forceinline__ int64_t of_rank(const Arguments& in, int row, int rank) {
  return static_cast<int64_t>(row) * in.shares.ranks + rank;
}

// A message of consecutive spans: Parts has COUNT of them, `span(in, row, rank, number)`.
template <class Parts>
struct Spans {
  Arguments in;
  static constexpr bool FINISHES = Parts::FINISHES;

  __device__ uint32_t* find(int row, int rank, int word) const {
#pragma unroll
    for (int number = 0; number < Parts::COUNT; ++number) {
      const Span span = Parts::span(in, row, rank, number);
      if (word < span.words) return span.at + word;
      word -= span.words;
    }
    return nullptr;
  }
  __device__ uint32_t read(int row, int word) const {
    const uint32_t* at = find(row, in.shares.rank, word);
    return at ? *at : 0;
  }
  __device__ void take(int row, int source, int word, uint32_t value) const {
    uint32_t* at = find(row, source, word);
    if (at) *at = value;
  }
  __device__ void finish(int row) const { Parts::finish(in, row); }
};

template <bool IS_LAST>
struct Surveys {
  static constexpr int COUNT = 1;
  static constexpr bool FINISHES = IS_LAST;

  __device__ static Span span(const Arguments& in, int row, int rank, int) {
    return span_of_slices(in, rank, in.scratch.surveys + row * SLICES_MAX);
  }
  // Chooses the tokens of greedy rows, with one CTA per row.
  __device__ static void finish(const Arguments& in, int row) {
    if (threadIdx.x >= WARP) return;
    const Sample sample = in.scratch.samples[row];
    if (sample.slot < 0) {
      if (threadIdx.x == 0) in.args.results[row] = padding_result();
      return;
    }
    Survey whole = nothing_seen();
    for (int slice = threadIdx.x; slice < in.slices; slice += WARP) {
      whole = join(whole, in.scratch.surveys[row * SLICES_MAX + slice]);
    }
    whole = join_warp(whole);
    if (threadIdx.x != 0) return;
    const baton_slot slot = in.pool.slots[sample.slot];
    baton_sample_result result = begin_result(in, sample, row, whole, slot.failed);
    if (result.status == BATON_SAMPLE_OK) result.token = whole.best_id;
    deliver(in, sample, row, result, slot.length);
  }
};

struct Weighed {
  static constexpr int COUNT = 5;
  static constexpr bool FINISHES = false;

  __device__ static Span span(const Arguments& in, int row, int rank, int number) {
    const Scratch& scratch = in.scratch;
    const bool has_draws = in.args.needs & BATON_NEEDS_DRAW;
    const bool has_cuts = has_draws && in.args.needs & BATON_NEEDS_CUT;
    const bool has_logprobs = in.args.needs & BATON_NEEDS_LOGPROBS;
    switch (number) {
      case 0: return has_draws ? span_of_slices(in, rank, scratch.winners + row * SLICES_MAX) : Span{};
      case 1: return has_logprobs ? span_of_runs(in, rank, scratch.raw_totals + row * RUNS_MAX) : Span{};
      case 2: return has_cuts ? span_of_runs(in, rank, scratch.totals + row * RUNS_MAX) : Span{};
      case 3: return has_cuts ? baton::span(scratch.numbers + of_rank(in, row, rank) * LEVELS, LEVELS) : Span{};
      default: return has_cuts ? baton::span(scratch.distances + of_rank(in, row, rank) * LEVELS, LEVELS) : Span{};
    }
  }
  __device__ static void finish(const Arguments&, int) {}
};

struct Logprobs {
  static constexpr int COUNT = 1;
  static constexpr bool FINISHES = true;

  __device__ static Span span(const Arguments& in, int row, int rank, int) {
    return baton::span(in.scratch.reported + of_rank(in, row, rank), 1);
  }
  __device__ static void finish(const Arguments& in, int row) {
    __shared__ Survey survey_shared;
    __shared__ float runs[RUNS_MAX];
    __shared__ double total_shared;
    __shared__ uint64_t top[GROUP_MAX * BATON_TOP_LOGPROBS_MAX];
    const Sample sample = in.scratch.samples[row];
    if (sample.slot < 0) return;
    baton_sample_result result = in.args.results[row];
    if (!is_reported_together(sample, result)) return;
    const baton_slot slot = in.pool.slots[sample.slot];
    const Survey survey = whole_survey(in, row, &survey_shared);
    const double total = log_total(in, row, runs, &total_shared);
    const int count = top_count(in, sample), all = count * in.shares.ranks;
    const Reported* reported = in.scratch.reported + of_rank(in, row, 0);
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
      const auto& entry = reported[i / count].top[i % count];
      top[i] = ranked_logit(entry.id, entry.logit);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
      int place = 0;
      for (int other = 0; other < all; ++other) place += top[other] < top[i];
      if (place >= count) continue;
      const auto& entry = reported[i / count].top[i % count];
      in.args.top[static_cast<int64_t>(row) * BATON_TOP_LOGPROBS_MAX + place] = {entry.id,
                                                                                logprob(entry.logit, survey, total)};
    }
    if (threadIdx.x == 0) {
      int owner = 0;
      while (owner + 1 < in.shares.ranks && result.token >= in.shares.firsts[owner + 1]) ++owner;
      result.logprob = logprob(reported[owner].raw, survey, total);
      result.top_count = count;
      if (sample.given >= 0) {
        result.detail = -1;
        for (int rank = 0; rank < in.shares.ranks; ++rank) result.detail -= reported[rank].greater;
      }
      deliver(in, sample, row, result, slot.length);
    }
    __syncthreads();  // before the next row's
  }
};

// ---- Lists of candidates ----

// The number of listed tokens, and the earliest arrival of each slice among the tokens that are kept for certain.
struct Heads {
  const Arguments& in;
  uint32_t (*counts)[GROUP_MAX];  // of this CTA's rows

  __device__ static int words(const Arguments& in, int rank) {
    return 1 + (in.shares.slices[rank + 1] - in.shares.slices[rank]) * static_cast<int>(sizeof(Winner) / 4);
  }
  __device__ uint32_t* winner(int row, int rank, int word) const {
    return span_of_slices(in, rank, in.scratch.winners + row * SLICES_MAX).at + word - 1;
  }
  __device__ uint32_t* count(int row, int rank) const { return &counts[row / gridDim.y][rank]; }

  __device__ uint32_t read(int row, int word) const {
    const int rank = in.shares.rank;
    if (word >= words(in, rank)) return 0;
    if (word > 0) return *winner(row, rank, word);
    const uint32_t listed = in.scratch.list_count[row];
    *count(row, rank) = listed;
    return listed;
  }
  __device__ void take(int row, int source, int word, uint32_t value) const {
    if (word == 0) {
      *count(row, source) = value;
    } else if (word < words(in, source)) {
      *winner(row, source, word) = value;
    }
  }
};

// A row's candidates, or its logits, word by word as Way defines.
template <class Way>
struct Single {
  const Way& way;

  __device__ void read(int item, uint32_t (&words)[ITEM_WORDS]) const {
#pragma unroll
    for (int i = 0; i < ITEM_WORDS; ++i) words[i] = way.read(item * ITEM_WORDS + i);
  }
  __device__ void take(int source, int item, const uint32_t (&words)[ITEM_WORDS]) const {
#pragma unroll
    for (int i = 0; i < ITEM_WORDS; ++i) way.take(source, item * ITEM_WORDS + i, words[i]);
  }
};

// The order of a list does not matter: this rank's tokens come first.
struct Candidates {
  uint32_t* list;
  const uint32_t* counts;
  int rank;

  __device__ uint32_t read(int word) const { return word < 2 * static_cast<int>(counts[rank]) ? list[word] : 0; }
  __device__ void take(int source, int word, uint32_t value) const {
    if (word >= 2 * static_cast<int>(counts[source])) return;
    int before = counts[rank];
    for (int other = 0; other < source; ++other) before += other == rank ? 0 : counts[other];
    const int to = 2 * before + word;
    if (to < 2 * LIST_MAX) list[to] = value;
  }
};

struct Logits {
  const Arguments& in;
  const float* own;
  float* row;  // logits of all tokens; may already hold this rank's logits

  __device__ uint32_t read(int word) const {
    const int id = in.first + word;
    if (id >= in.end) return 0;
    const float value = own[id];
    row[id] = value;
    return __float_as_uint(value);
  }
  __device__ void take(int source, int word, uint32_t value) const {
    const int id = in.shares.firsts[source] + word;
    if (id < in.shares.firsts[source + 1]) row[id] = __uint_as_float(value);
  }
};

// Maximum rows per CTA: BATON_SEQUENCES_MAX over EXCHANGE_BLOCKS.
constexpr int BLOCK_ROWS_MAX = BATON_SEQUENCES_MAX / EXCHANGE_BLOCKS;

template <int N>
__global__ void __launch_bounds__(EXCHANGE_THREADS, 2)
    candidates_kernel(const __grid_constant__ Group group, const __grid_constant__ Arguments in, int head_items,
                      int tokens_most, int capacity) {
  __shared__ uint32_t counts[BLOCK_ROWS_MAX][GROUP_MAX];
  pdl_wait_and_release();
  const Call call = begin_call(group);
  if (!count_cta(group, call)) return;
  Channel<N> channel(group, call, capacity);
  const Heads heads{in, counts};
  const int own_rows = (in.args.samples - blockIdx.y + gridDim.y - 1) / gridDim.y;
  // Every CTA of a row receives all of the row's head.
  if (!channel.exchange(RowItems<Heads>{heads, head_items}, 0, own_rows * head_items)) return;
  if (__syncthreads_or(channel.is_stopped())) return;
  for (int k = 0; k < own_rows; ++k) {
    const int row = blockIdx.y + k * gridDim.y;
    const int mode = in.scratch.cuts[row].mode;
    if (mode == Cut::NO_CUT) continue;
    const auto part = [&](int words, auto&& way) {
      const int items = (words + ITEM_WORDS - 1) / ITEM_WORDS, each = (items + gridDim.x - 1) / gridDim.x;
      const int begin = blockIdx.x * each;
      return channel.exchange(Single<std::remove_reference_t<decltype(way)>>{way}, begin, min(begin + each, items));
    };
    if (mode == Cut::NO_LIST) {
      const Sample sample = in.scratch.samples[row];
      if (!part(tokens_most, Logits{in, values_of(in, sample, row), adjusted_row(in, row)})) return;
      continue;
    }
    int most = 0, sum = 0;
    for (int rank = 0; rank < N; ++rank) {
      most = max(most, static_cast<int>(counts[k][rank]));
      sum += counts[k][rank];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) in.scratch.listed[row] = min(sum, LIST_MAX);
    uint32_t* list = reinterpret_cast<uint32_t*>(in.scratch.list + static_cast<int64_t>(row) * LIST_MAX);
    if (!part(2 * most, Candidates{list, counts[k], in.shares.rank})) return;
  }
}

template <int N>
int32_t exchange_candidates(const baton_group& group, const Arguments& in, int slices_most, int tokens_most,
                            cudaStream_t stream) {
  const int head_items = divide_up(1 + slices_most * static_cast<int>(sizeof(Winner) / 4), ITEM_WORDS);
  ExchangeShape shape;
  // The number of CTAs suits an exchange of whole rows of logits. If few rows need one, the other CTAs do nothing.
  BATON_TRY(exchange_shape(group, in.args.samples, divide_up(tokens_most, ITEM_WORDS), shape));
  return launch("sampling: candidates", candidates_kernel<N>, shape.grid, dim3(shape.threads), 0, stream,
                device_group(group), in, head_items, tokens_most, shape.capacity);
}

template <int N>
int32_t sample(const baton_group& group, const Arguments& in, cudaStream_t stream) {
  const int samples = in.args.samples, needs = in.args.needs;
  const bool has_draws = needs & BATON_NEEDS_DRAW, has_cuts = has_draws && needs & BATON_NEEDS_CUT;
  const bool has_logprobs = needs & BATON_NEEDS_LOGPROBS;
  int slices = 0, tokens = 0;
  for (int rank = 0; rank < N; ++rank) {
    slices = std::max(slices, in.shares.slices[rank + 1] - in.shares.slices[rank]);
    tokens = std::max(tokens, in.shares.firsts[rank + 1] - in.shares.firsts[rank]);
  }
  const int runs = divide_up(tokens, RUN);
  const int survey_words = slices * static_cast<int>(sizeof(Survey) / 4);
  if (needs & BATON_NEEDS_PENALTIES) BATON_TRY(launch_history(in, stream));
  if (needs & BATON_NEEDS_RULES) BATON_TRY(launch_rules(in, stream));
  BATON_TRY(launch_survey(in, stream));
  if (!has_draws && !has_logprobs) {
    return exchange_rows<N>("sampling: greedy", group, Spans<Surveys<true>>{in}, samples, survey_words, stream);
  }
  BATON_TRY(exchange_rows<N>("sampling: surveys", group, Spans<Surveys<false>>{in}, samples, survey_words, stream));
  BATON_TRY(launch_weigh(in, stream));
  const int words = (has_draws ? slices * static_cast<int>(sizeof(Winner) / 4) : 0) + (has_logprobs ? runs : 0) +
                    (has_cuts ? runs + 3 * LEVELS : 0);
  BATON_TRY(exchange_rows<N>("sampling: weighed", group, Spans<Weighed>{in}, samples, words, stream));
  if (has_cuts) {
    BATON_TRY(launch_gather(in, stream));
    BATON_TRY(exchange_candidates<N>(group, in, slices, tokens, stream));
  }
  BATON_TRY(launch_choose(in, stream));
  if (!has_logprobs) return BATON_OK;
  return exchange_rows<N>("sampling: log-probabilities", group, Spans<Logprobs>{in}, samples, sizeof(Reported) / 4,
                          stream);
}

template <int N>
int32_t load_all() {
  BATON_TRY(load(exchange_rows_kernel<N, Spans<Surveys<true>>>));
  BATON_TRY(load(exchange_rows_kernel<N, Spans<Surveys<false>>>));
  BATON_TRY(load(exchange_rows_kernel<N, Spans<Weighed>>));
  BATON_TRY(load(exchange_rows_kernel<N, Spans<Logprobs>>));
  return load(candidates_kernel<N>);
}

}  // namespace

int32_t load_tp_sample() {
  BATON_TRY(load_all<2>());
  BATON_TRY(load_all<4>());
  return load_all<8>();
}

}  // namespace baton

using namespace baton;
using namespace baton::collective;

BATON_API uint64_t baton_group_sample_scratch_bytes(int32_t ranks, int32_t samples_max, int32_t vocabulary) {
  return sampling::scratch_bytes(ranks, samples_max, vocabulary);
}

BATON_API int32_t baton_group_sample(const baton_group* group, const baton_pool* pool, const baton_step* step,
                                     const baton_sample_args* args, const int32_t* firsts, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(group && pool && step && args && firsts, "group, pool, step, args or firsts is null");
    BATON_TRY(check_group(*group));
    BATON_REQUIRE(args->samples <= BATON_SEQUENCES_MAX, "samples is %d; expected 0 to %d", args->samples,
                  BATON_SEQUENCES_MAX);
    sampling::Shares shares = {group->rank, group->ranks, {}, {}};
    std::copy_n(firsts, group->ranks + 1, shares.firsts);
    sampling::Arguments in;
    BATON_TRY(sampling::prepare(pool, step, args, shares, in));
    if (args->samples == 0) return BATON_OK;
    return with_ranks(group->ranks,
                      [&](auto count) { return sample<decltype(count)::value>(*group, in, as_stream(stream)); });
  });
}
