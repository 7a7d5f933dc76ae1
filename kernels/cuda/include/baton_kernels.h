/* The C ABI of libbaton_kernels.so, Baton's device code, which Rust calls.
 *
 * Rules of every function
 * - It returns 0 or one of `baton_error`; `baton_last_error()` then returns the error text of the thread.
 *   No C++ exception leaves the library.
 * - Pointers are device addresses unless their name ends in `_host`. `stream` is a `cudaStream_t`.
 *   The calling thread has a current CUDA context (the primary one), as every cudarc user has.
 * - No function allocates device memory, synchronizes with the device or reads from it. All work is enqueued
 *   on `stream`. Errors of running kernels are returned where the caller synchronizes the stream.
 * - Everything that takes a stream may be captured in a CUDA graph, unless its comment says "not in a
 *   graph". Values that change between steps are read from device memory. Arguments are values that a
 *   capture may freeze: shapes, addresses, upper bounds. Call `baton_initialise` before the first capture.
 * - Element types: `T` is the type that `dtype` names. Accumulators, vectors (norm weights, biases, RoPE
 *   frequencies) and the residual stream are f32 for every `T`.
 * - Matrices and activations are row-major and contiguous unless a stride is given; strides and offsets
 *   count elements. Widths, strides and head dimensions are multiples of 8;
 *   addresses are 16-byte aligned.
 * - Zero rows are not an error: nothing is launched.
 * - Structs are plain: no padding is left to the compiler (checked in abi.cu), all little-endian.
 */
#ifndef BATON_KERNELS_H
#define BATON_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
#define BATON_API extern "C" __attribute__((visibility("default")))
#else
#define BATON_API
#endif

/* Increases with every incompatible change of this file. */
#define BATON_ABI_VERSION 16

/* Tokens per KV block. */
#define BATON_BLOCK_TOKENS 16
/* Maximum alternatives that `baton_sample` reports per chosen token. */
#define BATON_TOP_LOGPROBS_MAX 32
/* Maximum samples per call, and maximum sequences per step. */
#define BATON_SEQUENCES_MAX 4096
/* Maximum KV groups: sets of layers with the same window, each with block table entries of its own. */
#define BATON_KV_GROUPS_MAX 16
/* Maximum LoRA adapters. */
#define BATON_ADAPTER_SLOTS_MAX 64

typedef enum {
  BATON_OK = 0,
  BATON_INVALID = 1,     /* an argument is out of range; the text names it, its value and the range */
  BATON_UNSUPPORTED = 2, /* well-formed, but this build or device has no kernel for it */
  BATON_TOO_SMALL = 3,   /* a workspace is too small; the text has the size needed */
  BATON_EXCEPTION = 4,   /* a C++ exception, its text in baton_last_error */
  BATON_CUDA = 1000      /* BATON_CUDA + cudaError_t */
} baton_error;

/* FP8 is the type of stored KV only: `dtype` of a baton_kv, and `kv_dtype` of decode attention. */
typedef enum { BATON_F32 = 0, BATON_BF16 = 1, BATON_FP8 = 2 } baton_dtype;

/* ---- The library itself ------------------------------------------------------------------------ */

/* Returns BATON_ABI_VERSION of the library. The caller compares it before any other call. */
BATON_API int32_t baton_abi_version(void);
/* Returns a static text with ABI version, CUDA version, GPU architectures and FlashInfer version. */
BATON_API const char *baton_build_info(void);
/* Returns the error text of this thread's last failed call, or an empty text. Valid until the thread's next failed
 * call. */
BATON_API const char *baton_last_error(void);
/* Loads every kernel onto the current device and sets its limits, so that no later call does (a first
 * launch under capture, or while a communication kernel waits for its peer, may hang). FlashInfer's kernels are
 * the exception: run each attention kind once before a capture. BATON_UNSUPPORTED
 * when the library has no code for the device. Not in a graph; takes up to a second. */
BATON_API int32_t baton_initialise(void);
/* 1: launches this library's kernels with programmatic dependent launch (PDL, compute capability 9.0 on), so that
 * consecutive kernels of a stream overlap at their edges; 0 (default): without. Captured graphs keep the setting of
 * their capture. Functions with a `pdl` argument use that argument instead.
 * In both cases the kernels of all but four functions of this library release their successor only after their own
 * predecessor has completed and its writes are visible. Data that a kernel reads before its wait must therefore be
 * written at least two kernels before. The other four functions release their successor at once. The successor of
 * baton_quantize and of baton_shrink, and of baton_combine_experts with a residual, may read only weights, and `ranks`
 * and `row_adapters` of a baton_low_rank, before its wait. The successor of baton_rope_store_kv may read only data that
 * is older than the kernel before baton_rope_store_kv, as attention does.
 * Other kernels (cuBLAS, FlashInfer) are launched without PDL and start after all their predecessors. */
BATON_API void baton_programmatic_launch(int32_t enabled);
/* Writes sizeof of the structs below, in the order of their definition, and returns their number. `sizes_host` may be null. */
BATON_API int32_t baton_struct_sizes(uint32_t *sizes_host, int32_t capacity);

/* ---- Rows: embedding, norms, activations ----------------------------------------------------------- */

/* residual[row][width] (f32) = table[tokens[row] - first] (T) * scale. A token outside of the table's `count` rows gives
 * zeros: another rank has its row. */
BATON_API int32_t baton_embed(int32_t dtype, const void *table, int32_t first, int32_t count,
                              float scale, const int32_t *tokens, float *residual, int32_t rows,
                              int32_t width, void *stream);

/* out[row] (T) = x / sqrt(mean(x^2) + eps) * weight, where x = residual[row]. Rows are at most 32768 wide. */
BATON_API int32_t baton_rms_norm(int32_t dtype, const float *residual, const float *weight, float eps,
                                 void *out, int32_t rows, int32_t width, void *stream);

/* x[row] (T) = x / sqrt(mean(x^2) + eps) * weight, in place. */
BATON_API int32_t baton_rms_norm_in_place(int32_t dtype, void *x, const float *weight, float eps,
                                          int32_t rows, int32_t width, void *stream);

/* residual[row] += delta[row] (T), then as baton_rms_norm. */
BATON_API int32_t baton_add_rms_norm(int32_t dtype, float *residual, const void *delta,
                                     const float *weight, float eps, void *out, int32_t rows,
                                     int32_t width, void *stream);

/* x[row] += bias: rows of x (T), bias [width]. */
BATON_API int32_t baton_add_bias(int32_t dtype, void *x, const float *bias, int32_t rows, int32_t width,
                                 void *stream);

typedef enum {
  BATON_SILU = 0,
  BATON_GELU_TANH = 1 /* GELU with its tanh approximation */
} baton_activation;

/* out[row][i] = activation(gate_up[row][i]) * gate_up[row][width + i]; gate_up is [rows][2 * width]. */
BATON_API int32_t baton_activate(int32_t dtype, int32_t activation, const void *gate_up, void *out,
                                 int32_t rows, int32_t width, void *stream);

typedef enum {
  BATON_QUANTIZE_ROWS = 0, /* y = x */
  BATON_QUANTIZE_NORM = 1, /* y as of baton_rms_norm of `residual`, or of baton_add_rms_norm where x is not null */
  BATON_QUANTIZE_SILU = 2  /* y as of baton_activate with BATON_SILU: a row of x has 2 * width elements */
} baton_quantize_source;

/* 80 bytes. */
typedef struct {
  const void *x;       /* bf16 [rows][x_stride]; may be null with NORM */
  int64_t x_stride;    /* a multiple of 8 */
  float *residual;     /* NORM: [rows][width]; with x, the sum is stored here */
  const float *norm;   /* NORM: [width] */
  void *mirror;        /* null, or y in bf16 [rows][width] */
  void *out;           /* FP8 (e4m3) */
  float *scales;       /* [rows] */
  float eps;           /* NORM */
  int32_t source;
  int32_t rows;
  int32_t width;       /* a multiple of 8, at most 65536 */
  int32_t parts;       /* FP8 numbers of each element, 1 or 2 */
  int32_t reserved;
} baton_quantize_args;

/* Computes rows y and quantizes them to FP8 (e4m3). With one part, out[row] = y / scales[row], where the scale maps the
 * row's largest magnitude to 448; a row of zeros has the scale 1. With two parts, y = scales[row] * (high + low / 32),
 * which keeps the precision of bf16. The scale is a power of two, the high parts of eight rows are followed by their
 * eight low parts, and `out` has 16 * ceil(rows / 8) rows. */
BATON_API int32_t baton_quantize(const baton_quantize_args *args, void *stream);

/* out[i] = x[indices[i]], rows of `width` elements. */
BATON_API int32_t baton_gather_rows(int32_t dtype, const void *x, const int32_t *indices, void *out,
                                    int32_t rows, int32_t width, void *stream);

/* ---- The KV arena -------------------------------------------------------------------------------------- */

/* Contiguous blocks of `[layer][K, V][head][token 16][dim]` from `base` on, with the layers of one KV group.
 *
 * With BATON_FP8, a block is [layer][K, V][head] of 16 * (dim + 1) bytes: the codes [token 16][dim] (e4m3), then the
 * scales' exponents [token 16], one byte E each. A value is code * 2^(E - 127), which is exact in bf16 and in f32. The
 * vector of a token and head is quantized from bf16. A magnitude beyond 1.875 * 2^127 counts as this number, NaN as 0.
 * If the largest magnitude is m * 2^x with 1 <= m < 2, E - 127 is x - 8 for m <= 1.75 and x - 7 above, and E is at least 1.
 * A code is value * 2^(127 - E), rounded to nearest even. */
typedef struct {
  void *base;
  int64_t block_elements; /* layer_count * 2 * head_count * 16 * head_dim; FP8: bytes, with head_dim + 1 */
  int32_t block_count;    /* trash block and zero block included */
  int32_t layer_count;
  int32_t head_count; /* KV heads */
  int32_t head_dim;   /* a multiple of 8, at most 256 */
  int32_t dtype;
  int32_t reserved;
} baton_kv;

/* Computes everything between the QKV GEMM and attention, in one pass. For every row of qkv
 * ([rows][(query_heads + 2 * kv.head_count) * head_dim], T = kv->dtype, bf16 for FP8; queries, keys, values):
 *   1. bias added (null: none; [that width]),
 *   2. an RMS norm of each query and key head (`query_norm`, `key_norm` [head_dim]; both or neither
 *      null); with `norms_all_heads`, one norm over all query heads and one over all key heads (`query_norm`
 *      [query_heads * head_dim], `key_norm` [kv.head_count * head_dim]),
 *   3. RoPE: pairs (i, i + rotary_dim/2) of query and key heads rotated by positions[row] * frequencies[i], an f32
 *      product (`frequencies` [rotary_dim/2], radians per position; null: no rotation),
 *   4. keys and values written (FP8: quantized) to destinations[row] = block * 16 + token in block, queries to
 *      queries, `query_stride` elements (a multiple of 8) from row to row (query_heads * head_dim when contiguous; `queries` may be
 *      qkv itself, with the width of its rows as stride). Keys and values of qkv are unchanged.
 * Arithmetic is f32 between loads and stores. With PDL, positions, destinations and frequencies are read before the
 * preceding kernel has completed: an older kernel wrote them. */
typedef struct {
  const void *qkv;
  void *queries;
  int64_t query_stride;
  const float *bias;
  const float *query_norm;
  const float *key_norm;
  const float *frequencies;
  const int32_t *positions;
  const int32_t *destinations;
  float norm_eps;
  int32_t query_heads;
  int32_t layer;
  int32_t rows;
  int32_t rotary_dim; /* dimensions of a head that are rotated: a multiple of 8 up to head_dim */
  int32_t norms_all_heads;
} baton_rope_args;
BATON_API int32_t baton_rope_store_kv(const baton_kv *kv, const baton_rope_args *args, void *stream);

/* Dequantizes a layer of FP8 KV for prefill attention: out (bf16) [page_count][K, V][head][16][dim] has the tokens of
 * block pages[i] at page i. Tokens that were never stored are undefined. */
BATON_API int32_t baton_dequantize_kv(const baton_kv *kv, int32_t layer, const int32_t *pages, int32_t page_count,
                                      void *out, void *stream);

/* ---- Low-rank updates (LoRA) --------------------------------------------------------------------------- */

/* Updates of one weight matrix [n][depth] by the adapters in all slots: y[row] += (x[row] A^T) B^T. The outputs are one to
 * three ranges with updates of their own (Q, K and V, or gate and up). ranks[slot] is the rank of the slot's adapter,
 * padded with zeros to a multiple of 16; 0: the slot is empty. A row without adapter, or with an empty slot, has no
 * update. 72 bytes. */
typedef struct {
  const void *a; /* bf16 [slots][ranges * rank_max * depth]; a slot uses the first [ranges][rank][depth] */
  const void *b; /* bf16 [slots][n * rank_max], scale included; a slot uses the first [n][rank] */
  const int32_t *ranks;        /* [slots] */
  const int32_t *row_adapters; /* slot of each row's adapter, or -1; with PDL read before the preceding kernel ends */
  /* [parts][rows][ranges * rank_max]: x A^T, as a sum over parts of k; a row uses the first [ranges][rank] of each part. A
   * GEMM computes it in up to 16 parts. */
  float *shrunk;
  uint64_t *progress; /* scratch counter of GEMMs: the caller sets 0 once, every GEMM leaves 0; one for each stream */
  int32_t firsts[2];           /* first outputs of the second and third range, multiples of 8; n without */
  int32_t ranges;              /* 1 to 3 */
  int32_t rank_max;            /* a multiple of 16 */
  int32_t slots;               /* 1 to BATON_ADAPTER_SLOTS_MAX */
  int32_t parts;               /* baton_shrink_parts of the rows and the depth; a GEMM: unused */
} baton_low_rank;

/* Returns the number of parts of k into which baton_shrink divides x A^T, so that enough CTAs read A: 1 to 4. rows * parts is
 * at most 256 with several parts. */
BATON_API int32_t baton_shrink_parts(int32_t rows, int32_t depth);

/* shrunk = x A^T for every row with an adapter. x is bf16 [rows][x_stride]. The next kernel of the stream is
 * baton_expand (baton_programmatic_launch). */
BATON_API int32_t baton_shrink(const baton_low_rank *update, const void *x, int64_t x_stride, int32_t rows, int32_t n,
                               int32_t depth, void *stream);
/* out[row] += shrunk[row] B^T for every row with an adapter. out is bf16 [rows][out_stride]. */
BATON_API int32_t baton_expand(const baton_low_rank *update, void *out, int64_t out_stride, int32_t rows, int32_t n,
                               void *stream);

/* ---- Skinny (small-M) GEMMs -------------------------------------------------------------------------------- */

typedef enum {
  BATON_SKINNY_PLAIN = 0,    /* out bf16 [rows][n] = x W^T (+ bias) */
  BATON_SKINNY_RESIDUAL = 1, /* residual f32 [rows][n] += x W^T (+ bias); mirror for the next GEMM */
  BATON_SKINNY_SILU = 2,     /* W holds n/2 gate rows, then n/2 up rows; out bf16 [rows][n/2] = silu(gate) * up */
  BATON_SKINNY_F32 = 3,      /* out f32 [rows][n] = x W^T: logits */
  BATON_SKINNY_QKV = 4       /* + bias, RoPE of queries and keys, store of keys and values into the arena */
} baton_skinny_epilogue;

/* 296 bytes. */
typedef struct {
  const void *weight; /* bf16 or FP8 (e4m3) [n][depth], contiguous */
  /* Null: the weight is bf16. Else it is FP8, and depth is a multiple of 16. Row i is multiplied by weight_scales[i], or
   * with `weight_block` a block of 128 x 128 by its scale in weight_scales [ceil(n / 128)][ceil(depth / 128)]. */
  const float *weight_scales;
  const void *x;      /* bf16 [rows][x_stride], or with `parts` FP8 as baton_quantize writes it */
  const float *x_scales; /* with `parts`: [rows] */
  int64_t x_stride;   /* at least depth, a multiple of 8, with `parts` of 16 */
  /* Null, or the sums of squares of every row before its norm, [rows][squares_count]: the results of row r are
   * scaled by 1 / sqrt(sum of its squares / depth + eps). Then x is the residual times the norm's weight, as written
   * by RESIDUAL. */
  const float *squares;
  const float *bias;  /* [n] or null; PLAIN, RESIDUAL and QKV */
  void *out;          /* RESIDUAL: unused */
  int64_t out_stride; /* QKV: stride of the query rows */
  float *residual;    /* RESIDUAL: [rows][n] contiguous */
  void *mirror;       /* RESIDUAL: [rows][n] contiguous bf16, or null: the new residual, times next_norm [n] if not null */
  const float *next_norm;
  float *squares_out; /* RESIDUAL: null, or [rows][ceil(n / tile)], for the next GEMM's `squares` */
  /* QKV: k and v are this layer's keys and values of block 0 (strides of a baton_kv: block_elements, 16 * head_dim,
   * head_dim); destinations[row] = block * 16 + token, negative for none; angles are positions[row] *
   * frequencies[i], frequencies null for no rotation. Heads are not normalized: models with head norms use PLAIN and
   * baton_rope_store_kv. */
  void *k;
  void *v;
  int64_t stride_block;
  int64_t stride_head;
  int64_t stride_token;
  const float *frequencies;
  const int32_t *positions;
  const int32_t *destinations;
  float eps;
  int32_t rows;  /* 0 to baton_skinny_gemm_rows_max() */
  int32_t n;     /* rows of the weight; even with SILU */
  int32_t depth; /* columns of the weight, a multiple of 8 */
  int32_t epilogue;
  int32_t query_heads; /* QKV: n = (query_heads + 2 * kv_heads) * head_dim, head_dim a multiple of the tile */
  int32_t kv_heads;
  int32_t head_dim;
  int32_t grid; /* maximum CTAs; 0: one per SM */
  int32_t tile; /* weight rows per tile; 0: automatic, else a value that baton_skinny_gemm_tile may return */
  int32_t pdl;  /* 1: may start before the preceding kernel of the stream, of any kind, has completed: until then the
                   GEMM only reads weights, row_adapters, and ranks and weights of adapters */
  int32_t squares_count;
  int32_t weight_block; /* 128: weight_scales are those of blocks; else 0 */
  int32_t parts; /* rows in FP8 of each row of x, 1 or 2, with scales of the weight's rows; 0: x is bf16 */
  /* With `shrunk`: the update is added to x W^T before scale and epilogue. The GEMM computes `shrunk` from x. Only for
   * weights in bf16, and not with epilogue F32. The rows' adapters and their ranks must not change from the start of the
   * GEMM's first CTA, with PDL before the preceding kernel ends, to its end: its CTAs would wait forever. */
  baton_low_rank low_rank;
} baton_skinny_gemm_args;

/* y = x W^T in bf16 with f32 accumulators, bound by reading the weight, with fused neighbouring operations of a decode
 * step. BATON_UNSUPPORTED above the maximum rows and for shapes without a tile. Results do not depend on `pdl`. They
 * depend on the tile, on the order of a row's squares, on `parts`, and on whether there are more than 8, 16 or 64 rows. */
BATON_API int32_t baton_skinny_gemm(const baton_skinny_gemm_args *args, void *stream);
/* Returns the weight rows per tile for these arguments (rows, n, depth, epilogue, head_dim, grid, tile, weight_block,
 * parts and whether weight_scales and low_rank.shrunk are null matter; other addresses may be null); squares_out has ceil(n / tile) numbers
 * per row. 0: there is no kernel for the shape, or cuBLAS is faster. */
BATON_API int32_t baton_skinny_gemm_tile(const baton_skinny_gemm_args *args);
/* Maximum rows of baton_skinny_gemm; baton_skinny_gemm_tile decides by shape. */
BATON_API int32_t baton_skinny_gemm_rows_max(void);

/* ---- Slots: the state of every sequence on the device --------------------------------------------- */

/* Sampling parameters of a slot; kernels/src/sampling.rs has the rules. 64 bytes. */
typedef struct {
  uint64_t seed;
  float temperature; /* below 1e-5: greedy */
  float top_p;       /* 1 keeps all */
  float min_p;       /* 0 keeps all */
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  uint32_t top_k;      /* 0 keeps all */
  uint32_t min_tokens; /* stop tokens are masked before this many tokens */
  int32_t stop_count;  /* length of the slot's row of `stop_tokens` */
  int32_t logprobs;    /* -1: none; else this many alternatives, at most BATON_TOP_LOGPROBS_MAX */
  int32_t prompt_len;  /* output index = tokens before - prompt_len */
  /* The slot's row of `rules` has three parts in this order: bias_count pairs of a token and an f32 bias; bad_count
   * tokens of bad words, where bit 31 marks the last token of each word; if is_listed, a bitmask
   * [ceil(vocabulary / 32)] of the allowed tokens. */
  uint16_t bias_count;
  uint16_t is_listed;
  int32_t bad_count;
  int32_t prompt_logprobs; /* 0: none; n: log-probabilities of prompt tokens, with n - 1 alternatives each */
} baton_sampling;

/* 16 bytes. */
typedef struct {
  int32_t position; /* tokens whose KV is computed, or will be by the steps launched so far */
  int32_t length;   /* tokens in the pool */
  int32_t failed;   /* 0, or the baton_sample_status of the sample that had no token */
  int32_t drafts;   /* draft tokens behind `length` that the current step verifies */
} baton_slot;

/* Device arrays of the running batch, allocated once and zeroed. The first index is the slot. 152 bytes. */
typedef struct {
  baton_slot *slots;         /* [slot_count] */
  baton_sampling *sampling;  /* [slot_count] */
  int32_t *tokens;           /* [slot_count][token_width]: the token pool */
  int32_t *block_tables;     /* [slot_count][table_width]: entry i * group_count + g is the block of tokens 16 i .. 16 i + 15
                                in KV group g; entries behind the window of a group are not read */
  int32_t *stop_tokens;      /* [slot_count][stop_width] */
  int32_t *rules;            /* [slot_count][rule_width] */
  int32_t slot_count;
  int32_t token_width; /* longest sequence */
  int32_t table_width;
  int32_t stop_width;
  int32_t trash_block; /* block that padding rows write to; in no table */
  int32_t rule_width;
  int32_t zero_block;  /* block of zeros, in place of blocks behind a window */
  int32_t group_count; /* KV groups */
  int32_t windows[BATON_KV_GROUPS_MAX]; /* of each group: tokens that a token attends to, itself included; 0: all */
  int32_t *adapters; /* [slot_count]: slot of the sequence's adapter, or -1 */
} baton_pool;

/* ---- A step's plan: one small upload -------------------------------------------------------------------- */

/* The plan is a range of 32-bit words that begins with this header; `*_at` are word offsets from its
 * start (`sequences_at` and `admissions_at` are multiples of 4 for alignment). 64 bytes. */
typedef struct {
  uint32_t word_count; /* of the whole plan */
  uint32_t sequence_count;
  uint32_t row_count;    /* sum of the sequences' row_count */
  uint32_t sample_count; /* sum of the sequences' sample_count */
  uint32_t admission_count;
  uint32_t run_count;
  uint32_t sequences_at;  /* baton_plan_sequence[sequence_count] */
  uint32_t admissions_at; /* baton_plan_admission[admission_count] */
  uint32_t runs_at;       /* baton_plan_run[run_count] */
  uint32_t step_id;       /* echoed in every result */
  uint32_t reserved[6];
} baton_plan_header;

/* One sequence of the step: row_count tokens from its slot's position on. Its last sample_count rows are
 * sampled. 16 bytes. */
typedef struct {
  int32_t slot;
  int32_t row_count;
  int32_t sample_count;
  int32_t drafts; /* draft tokens that the plan's runs write behind the slot's tokens */
} baton_plan_sequence;

/* A sequence admitted to a slot; applied before runs and sequences. 96 bytes. */
typedef struct {
  int32_t slot;
  int32_t adapter; /* slot of the adapter, or -1 */
  int32_t reserved[2];
  baton_slot state;
  baton_sampling sampling;
} baton_plan_admission;

typedef enum {
  BATON_RUN_TOKENS = 0, /* tokens[slot][first..] */
  BATON_RUN_BLOCKS = 1, /* block_tables[slot][first..] */
  BATON_RUN_STOPS = 2,  /* stop_tokens[slot][first..] */
  BATON_RUN_RULES = 3   /* rules[slot][first..] */
} baton_run_target;

/* `count` words of the plan from `at` on go to a slot's row. Runs of one plan do not overlap. 20 bytes. */
typedef struct {
  int32_t target;
  int32_t slot;
  int32_t first;
  int32_t count;
  uint32_t at;
} baton_plan_run;

/* The expanded plan on the device. Arrays are allocated once for the largest step. */
typedef struct {
  int32_t *row_tokens;       /* [rows_max] */
  int32_t *row_positions;    /* [rows_max] */
  int32_t *row_destinations; /* [group_count of the pool][rows_max]: block * 16 + position % 16 */
  int32_t *row_sequences;    /* [rows_max] */
  int32_t *row_indptr;       /* [sequences_max + 1] */
  int32_t *page_indptr;      /* [sequences_max + 1] */
  int32_t *page_indices;     /* [group_count of the pool][pages_max] */
  int32_t *last_page_tokens; /* [sequences_max]: 1 to 16 */
  int32_t *kv_lengths;       /* [sequences_max]: tokens, this step's included; padding: 0 */
  int32_t *sequence_slots;   /* [sequences_max]; -1 for padding */
  int32_t *sampled_rows;     /* [samples_max]; padding: 0 */
  int32_t *sample_slots;     /* [samples_max]; padding: -1 */
  int32_t *sample_masks;     /* [samples_max]: row of the masks or -1 */
  int32_t *counts;           /* [8]: sequences, rows, samples, pages (padding not counted), step_id, 0.. */
  int32_t rows_max;
  int32_t sequences_max;
  int32_t pages_max;
  int32_t samples_max;
  int32_t *row_adapters;    /* [rows_max]: slot of the adapter, or -1 */
  int32_t *sample_adapters; /* [samples_max]: row_adapters of the sampled rows */
} baton_step;

/* Applies a plan: admissions and runs are written to the pool, then `step` is filled. Positions of the
 * plan's slots are advanced by their row_count.
 * Rows, sequences and samples are padded up to `rows`, `sequences` and `samples` (those of the graph, or
 * exactly the plan's). A padding sequence has one row, which follows the real rows: token 0 at position 0,
 * one page, the trash block. So rows - row_count is at least sequences - sequence_count; padding rows beyond
 * that write to the trash block too and belong to no sequence (row_sequences is -1).
 * A plan that does not fit these bounds, or names a slot or place outside the pool, is a bug of the
 * caller that the device does not check.
 * Two launches. `plan` is 16-byte aligned. */
BATON_API int32_t baton_step_prepare(const baton_pool *pool, const void *plan, const baton_step *step,
                                     int32_t rows, int32_t sequences, int32_t samples, int32_t tokens,
                                     void *stream);

/* Supplies the token bitmasks of the constrained samples of a prepared step. `words` has `count` pairs: the index of
 * a sample, and its row of the masks. Without a bitmask (-1) the sample becomes padding, and its slot goes back by
 * one position. */
BATON_API int32_t baton_step_supply(const baton_pool *pool, const void *words, const baton_step *step, int32_t count,
                                    void *stream);

/* ---- Attention ------------------------------------------------------------------------------------------------ */

typedef enum {
  BATON_ATTENTION_AUTO = 0,   /* the fastest kernel that supports the shape */
  BATON_ATTENTION_PLAIN = 1,  /* Baton's: any dtype, head_dim <= 256, group; a row's result does not depend on batch or chunk */
  BATON_ATTENTION_FA2 = 2,    /* FlashInfer FA2: bf16, any rows and group, dims 64, 128, 256 */
  BATON_ATTENTION_FA3 = 3     /* FlashInfer FA3: as FA2, no window, compute capability 9.0 */
} baton_attention_kind;

typedef struct {
  int32_t query_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t dtype;
  int32_t window; /* a row sees itself and the window - 1 tokens before; 0: all */
  float scale;    /* of the scores, usually 1 / sqrt(head_dim) */
} baton_attention_shape;

/* A step's lengths on the host, for attention planning. */
typedef struct {
  const int32_t *row_indptr_host;  /* [sequences + 1] */
  const int32_t *page_indptr_host; /* [sequences + 1] */
  const int32_t *kv_lengths_host;  /* [sequences]; equal to the device's, which are 0 for padding */
  int32_t sequences;               /* padding included (1 row, 1 page, here of length 1) */
  int32_t rows;
} baton_attention_batch;

/* Workspace of attention, allocated once. Two plans in flight need two `pinned_host` (and two of `ints` unless
 * they are on one stream). */
typedef struct {
  void *floats; /* device, 128-byte aligned; 288 MiB suffices for all shapes */
  uint64_t float_bytes;
  void *ints; /* device; 8 MiB suffices for all shapes */
  uint64_t int_bytes;
  void *pinned_host; /* page-locked, as large as `ints` */
} baton_attention_workspace;

/* A plain value. A captured run of FA2 or FA3 may be replayed only with the plan of its capture. */
typedef struct {
  int32_t kind; /* never AUTO */
  int32_t word_count;
  int64_t words[22];
} baton_attention_plan;

/* Plans the step's attention: host arithmetic on the `_host` arrays, written to pinned_host, then
 * one asynchronous copy to `ints` on `stream`. The caller may reuse pinned_host when the copy has completed.
 * Called once per step for all layers of one shape. Not in a graph. PLAIN needs no workspace (pass null). */
BATON_API int32_t baton_attention_prepare(int32_t kind, const baton_attention_shape *shape,
                                          const baton_attention_batch *batch,
                                          const baton_attention_workspace *workspace,
                                          baton_attention_plan *plan_host, void *stream);

/* out[row][query_heads * head_dim] = causal attention of queries[row] (rows `query_stride` apart) over the blocks
 * of the row's sequence. The last row of a sequence sees kv_lengths tokens, and each earlier row one token less.
 * PLAIN reads row_sequences, row_positions, page_indptr, page_indices; rows of no sequence give zeros.
 * `sinks` [query_heads] are attention sinks: logits that count in the denominators of the softmax and have no value
 * (null: none). `rows` as in the batch. */
BATON_API int32_t baton_attention_run(const baton_attention_plan *plan_host,
                                      const baton_attention_shape *shape,
                                      const baton_attention_workspace *workspace, const baton_kv *kv,
                                      int32_t layer, const void *queries, int64_t query_stride,
                                      const baton_step *step, const float *sinks, void *out,
                                      int32_t sequences, int32_t rows, void *stream);

/* Baton's decode attention: one query token per row, KV in bf16 or FP8, any mix of lengths, no host plan. A captured
 * launch follows the lengths in device memory. With `tokens` above 1, every row has this many query tokens, which verify draft tokens:
 * query token t of row r is row r * tokens + t of `q` and `out`, and sees the first positions[r * tokens] + 1 + t tokens,
 * at most kv_len[r].
 * With FP8, q is rounded to f16 (at most 65,504), and so is 2^8 times a probability times the scale of its token's values.
 * Values are cut in a token whose largest value is 2^16 or more, and lose precision where it is below about 2^-6: the
 * absolute error of such a product is up to 2^-25. 168 bytes. */
typedef struct {
  const void *q;    /* bf16 [rows][kv_heads * group][head_dim], rows q_stride apart */
  int64_t q_stride; /* at least kv_heads * group * head_dim, a multiple of 8 */
  const void *k;    /* this layer's keys of block 0 */
  const void *v;
  /* Strides of a baton_kv: block_elements, 16 * head_dim, head_dim; multiples of 8. FP8: bytes, block_elements,
   * 16 * (head_dim + 1), head_dim; multiples of 16. */
  int64_t stride_block;
  int64_t stride_head;
  int64_t stride_token;
  const int32_t *pages;       /* the blocks of row r: pages[page_indptr[r]..] */
  const int32_t *page_indptr; /* [rows + 1] */
  const int32_t *kv_len; /* [rows]: tokens, those being decoded included; 0 yields zeros (1 at least if tokens > 1) */
  void *out;             /* as q, rows out_stride apart */
  int64_t out_stride;
  void *partial;     /* baton_decode_attention_workspace(sms, ..) bytes */
  int32_t *counters; /* [rows * tokens * kv_heads], zeroed once; every call leaves them at zero. One call at a time may use
                        `partial` and `counters` */
  int32_t rows;      /* 0 to 1,024 */
  int32_t kv_heads;
  int32_t group;    /* query heads a KV head: 1 to 16 */
  int32_t head_dim; /* 64, 128 or 256 */
  int32_t window;   /* tokens attended to; 0: all */
  float scale;      /* of the scores, usually 1 / sqrt(head_dim) */
  int32_t sms;      /* SMs to use; 0: all */
  /* 1: may start before the preceding kernel of the stream has completed. Until then, the kernel reads kv_len,
   * positions, page_indptr, pages, and the KV before the page of a row's first query token. The preceding kernel must
   * not write any of these, and must be baton_rope_store_kv or release its successor only after its own wait. Use 0
   * after baton_step_prepare, a block copy, or another library's kernel with programmatic launch. */
  int32_t pdl;
  int32_t tokens;   /* query tokens a row; 0 and 1: one. rows * tokens is at most 1,024 above 1 */
  int32_t kv_dtype; /* BATON_BF16 or BATON_FP8 */
  const int32_t *positions; /* [rows * tokens], of the query tokens; only read if tokens > 1 */
  const float *sinks;       /* as in baton_attention_run */
} baton_decode_attention_args;

/* Returns the bytes of `partial` for this number of SMs (0: all of the current device); 0 when an argument is out of
 * range. */
BATON_API int64_t baton_decode_attention_workspace(int32_t sms, int32_t kv_heads, int32_t group, int32_t head_dim);
BATON_API int32_t baton_decode_attention(const baton_decode_attention_args *args, void *stream);

/* ---- Sampling ------------------------------------------------------------------------------------------------- */

typedef enum {
  BATON_SAMPLE_OK = 0,
  BATON_SAMPLE_BAD_LOGIT = 1,   /* NaN or +infinity at `token`, its bits in `logprob` */
  BATON_SAMPLE_NO_CANDIDATE = 2, /* every token is masked */
  BATON_SAMPLE_REJECTED = 3,     /* a draft token before it was not accepted (set by baton_accept) */
  BATON_SAMPLE_NOT_DRAFTED = 4   /* there was no draft token (set by baton_accept) */
} baton_sample_status;

/* One sampled row's result. 32 bytes. */
typedef struct {
  int32_t status;
  int32_t token;    /* chosen; BAD_LOGIT: the lowest bad id; NO_CANDIDATE: -1 */
  int32_t slot;     /* -1: padding, nothing else is set */
  int32_t position; /* of the row that was sampled; the token's own is one more */
  float logprob;    /* of the chosen token, when the slot asks for log-probabilities */
  int32_t top_count;
  uint32_t step_id;
  int32_t detail; /* 1: the row's logits were gathered from all GPU ranks; below 0: minus the given token's rank */
} baton_sample_result;

typedef struct {
  int32_t token;
  float logprob;
} baton_token_logprob;

/* Sampling features that any row of a call needs: bits of baton_sample_args.needs. */
typedef enum {
  BATON_NEEDS_DRAW = 1,      /* a temperature of 1e-5 or more */
  BATON_NEEDS_CUT = 2,       /* with it: top_k, or a top_p below 1 (min_p needs no bit) */
  BATON_NEEDS_LOGPROBS = 4,  /* logprobs of 0 or more */
  BATON_NEEDS_PENALTIES = 8, /* repetition, presence or frequency penalty (masks and min_tokens need no bit) */
  BATON_NEEDS_RULES = 16,    /* biases, bad words or listed tokens */
  BATON_NEEDS_ALL = 31
} baton_sample_needs;

typedef struct {
  const float *logits;  /* [samples][logit_stride] */
  int64_t logit_stride; /* elements; at least vocabulary, multiple of 4 */
  const uint32_t *masks; /* [mask rows][ceil(vocabulary / 32)]; null when no sequence has a mask */
  baton_sample_result *results;  /* [samples_max] */
  baton_token_logprob *top;      /* [samples_max][BATON_TOP_LOGPROBS_MAX], best first */
  void *scratch;                 /* baton_group_sample_scratch_bytes of one rank for step.samples_max; zeroed once */
  uint64_t scratch_bytes;
  int32_t vocabulary;
  int32_t samples; /* padded */
  int32_t needs;   /* bits of baton_sample_needs, which select the kernels: 0 launches one kernel, ALL six */
  int32_t verifies; /* 1: the samples verify draft tokens; the slots are left to baton_accept */
} baton_sample_args;

/* Chooses a token for every sample of `step` by its slot's baton_sampling, with the rules, tie-breaks and
 * random numbers of the CPU. If position + 1 is the slot's length (no draft token or given token follows the row),
 * the token is written to tokens[slot][position + 1] and the length grows by one. A failed sample marks its slot,
 * whose later samples repeat the status. In a slot with prompt_logprobs, a sample whose next token is still in the
 * prompt has a given token: the sample reports this prompt token with its log-probability and its rank, and ignores
 * the other settings. A setting whose bit is missing in `needs` counts as not set: without DRAW every row is greedy. */
BATON_API int32_t baton_sample(const baton_pool *pool, const baton_step *step,
                               const baton_sample_args *args, void *stream);

/* ---- Speculative decoding -------------------------------------------------------------------------------- */

/* A step that verifies draft tokens has `tokens` > 0 in baton_step_prepare. Every sequence, padding included, then has
 * exactly `tokens` rows and samples: sample i of sequence s is s * tokens + i. A plan's row_count = sample_count is one
 * plus the draft tokens that the slot has blocks for; its rows beyond write to the trash block and are not sampled.
 * Positions are not advanced: baton_accept does that. Rows of draft tokens hold the slot's last token until
 * baton_draft has replaced it.
 *
 * Appends up to row_count - 1 draft tokens to each slot of the step whose draft tokens are not in the plan (prompt
 * lookup). The kernel searches the slot's tokens for an earlier occurrence of their last ngram_min to ngram_max tokens,
 * the longest one, or the latest of equally long ones. The tokens after this occurrence become the draft tokens. An
 * occurrence that reaches the end continues into its own draft tokens. */
BATON_API int32_t baton_draft(const baton_pool *pool, const baton_step *step, int32_t sequences, int32_t tokens,
                              int32_t ngram_min, int32_t ngram_max, void *stream);
/* After baton_sample with `verifies`: keeps the samples of each slot up to the first that differs from the draft token
 * in its place or has become padding, appends these tokens, and advances the slot. The status of the other samples
 * becomes BATON_SAMPLE_REJECTED or BATON_SAMPLE_NOT_DRAFTED. A slot whose first sample has become padding stays at its
 * last token. */
BATON_API int32_t baton_accept(const baton_pool *pool, const baton_step *step, int32_t sequences, int32_t tokens,
                               baton_sample_result *results, void *stream);

/* ---- For tests and benchmarks --------------------------------------------------------------------------- */

/* Keeps the stream busy for this time. */
BATON_API int32_t baton_delay(int64_t nanoseconds, void *stream);
/* Reads `bytes` (a multiple of 16) once and xors all words into `sink` [1], with two CTAs of 512 threads per SM, the
 * fastest. */
BATON_API int32_t baton_read_stream(const void *from, uint64_t bytes, uint32_t *sink, void *stream);

#endif /* BATON_KERNELS_H */
