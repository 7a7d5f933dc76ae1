/* Mixtures of experts: a part of the C ABI, with the rules of baton_kernels.h. An assignment is a row and one of
 * its `count` experts: assignment = row * count + slot. Its position is its place in the list of all assignments by
 * expert, then by row. */
#ifndef BATON_EXPERTS_H
#define BATON_EXPERTS_H

#include "baton_kernels.h"

#define BATON_EXPERTS_MAX 512        /* experts of a layer */
#define BATON_EXPERTS_CHOSEN_MAX 32  /* experts of a row */

/* 152 bytes. */
typedef struct {
  const void *x;        /* bf16 [rows][x_stride]; null with `logits` */
  int64_t x_stride;     /* at least hidden, a multiple of 8 */
  const float *squares; /* null, or as in baton_skinny_gemm_args: x lacks the scale of its norm */
  const void *router;   /* bf16 [experts][hidden] */
  float *logits;        /* null: x times the router; else f32 [rows][experts], which is overwritten, and x is not read */
  const float *bias;    /* null, or [experts]: added as `score` says */
  void *split;          /* null, or FP8 [rows][2][hidden]: x as the sum of two parts, times `scales`; null with `logits` */
  int32_t *expert_of;   /* [rows][count]: experts of each row, by falling score plus bias */
  float *weights;       /* [rows][count] */
  float *scales;        /* [rows]: scales of the rows of x, or of `split`; not written with `logits` */
  int32_t *offsets;     /* [experts + 1]: first position of each expert, and the number of assignments */
  int32_t *order;       /* [rows * count]: the assignment at each position */
  int32_t *arrivals;    /* a number that is 0 before the call and after its work */
  float eps;
  int32_t squares_count;
  int32_t rows;
  int32_t hidden;  /* a multiple of 8 */
  int32_t experts; /* 1 to BATON_EXPERTS_MAX */
  int32_t count;   /* 1 to BATON_EXPERTS_CHOSEN_MAX, at most `experts` */
  int32_t is_normalized; /* whether a row's weights are divided by their sum */
  int32_t score;         /* 0: softmax over the logits; 1: sigmoid of each logit; in both cases the bias is added to the
                            scores for the choice only, not to the weights; 2: softmax over logits plus bias */
  int32_t groups;        /* number of groups of neighbouring experts; 1 to 32, a divisor of `experts` */
  int32_t groups_chosen; /* number of groups from which the experts of a row come: those with the greatest sums of
                            their two best scores, with bias */
  float scale;           /* factor of the weights */
  int32_t reserved;
} baton_route_args;

/* Chooses the experts of each row by scores in f32, and lists the assignments by expert. Among equal scores the lowest
 * expert or group is chosen. Results of a row do not depend on the other rows. */
BATON_API int32_t baton_route(const baton_route_args *args, void *stream);

/* 136 bytes. */
typedef struct {
  const void *weight;    /* bf16 or, with weight_scales, FP8 (e4m3) [n][depth] of expert 0, contiguous */
  int64_t weight_stride; /* elements from one expert's weight to the next, a multiple of 8 */
  const void *x;         /* bf16 [rows][x_stride] (gate and up), or [rows * count][x_stride] by position (down);
                            with weight_scales, FP8 of this shape with `parts` rows for each row of x */
  int64_t x_stride;
  const float *scales;   /* gate and up: null, or a factor of each row of x; not null with weight_scales */
  void *out;             /* gate and up: bf16 [rows * count][n / 2] by position, silu(gate) * up; with
                            weight_scales, in the form of x of down; down: bf16 [rows * count][n] by assignment */
  int64_t out_stride;
  const int32_t *offsets; /* of baton_route */
  const int32_t *order;
  const float *weight_scales;   /* null, or f32 [n] of expert 0: the scale of each row of the weight */
  int64_t weight_scales_stride; /* from one expert to the next */
  float *factors;        /* with weight_scales: f32 [rows * count][factor_stride] by position: a factor for every 64
                            columns of x of down; gate and up write the factors, down reads them */
  int32_t rows;
  int32_t experts;
  int32_t count;
  int32_t n;     /* rows of a weight, a multiple of 8: outputs, or gate rows and then up rows, each a multiple of 8 */
  int32_t depth; /* columns of a weight, a multiple of 8 */
  int32_t is_gate_up;
  int32_t grid; /* maximum CTAs; 0: one per SM */
  int32_t pdl;  /* as in baton_skinny_gemm_args. `offsets` and `order` were written at least two kernels before a call
                   for down */
  int32_t parts; /* with weight_scales: 1: x is rounded to FP8; 2: x is the sum of two numbers, high + low / 32 */
  int32_t factor_stride; /* even */
} baton_expert_gemm_args;

/* Multiplies each row by the weights of its experts. A row's results do not depend on the other rows.
 * BATON_UNSUPPORTED except on compute capability 9.0. */
BATON_API int32_t baton_expert_gemm(const baton_expert_gemm_args *args, void *stream);

/* 136 bytes. */
typedef struct {
  const void *weight;    /* MXFP4 [n][depth] of expert 0 in chunks of 64 rows and 64 columns. The chunks of the first 64
                            rows come first. Rows and columns are padded with zeros to whole chunks. Rows of gate
                            and up alternate: eight of gate, then eight of up for the same outputs. A chunk has 2,048
                            bytes of numbers and 128 bytes of scales, in the order that kernels/src/mxfp4.rs defines */
  int64_t weight_stride; /* bytes from one expert's weight to the next, a multiple of 16 */
  const float *bias;     /* null, or [n] of expert 0: outputs, or gate and then up */
  int64_t bias_stride;   /* from one expert to the next */
  const void *x;         /* bf16 [rows][x_stride] (gate and up), or [rows * count][x_stride] by position (down) */
  int64_t x_stride;
  const float *scales;   /* gate and up: null, or a factor of each row of x */
  void *out;             /* gate and up: bf16 [rows * count][n / 2] by position:
                            g * sigmoid(alpha * g) * (u + 1), where g is the gate value, at most `limit`, and u the up
                            value, clamped to -limit..limit; down: bf16 [rows * count][n] by assignment */
  int64_t out_stride;
  const int32_t *offsets; /* of baton_route */
  const int32_t *order;
  void *sorted;  /* gate and up: scratch, bf16 [rows * count][depth], into which many rows of x are copied by position;
                    down: null */
  int32_t rows;
  int32_t experts;
  int32_t count;
  int32_t n;     /* rows of a weight: outputs, a multiple of 8, or gate and up rows, each a multiple of 8 */
  int32_t depth; /* columns of a weight, a multiple of 32 */
  int32_t is_gate_up;
  int32_t grid; /* `grid` and `pdl` as in baton_expert_gemm_args */
  int32_t pdl;
  float alpha;
  float limit;
} baton_mxfp4_gemm_args;

/* Multiplies each row by the weights of its experts, which are widened to bf16 exactly. A row's results do not depend
 * on the other rows. BATON_UNSUPPORTED except on compute capability 9.0. */
BATON_API int32_t baton_mxfp4_gemm(const baton_mxfp4_gemm_args *args, void *stream);

/* 112 bytes. */
typedef struct {
  const void *outputs;  /* bf16 [rows][count][width]: the experts' outputs */
  const float *weights; /* [rows][count] */
  float *residual;      /* null, or f32 [rows][width] */
  const float *norm;    /* with residual: the weight of its norm */
  void *out;            /* bf16 [rows][width] */
  void *quantized;      /* null, or with residual: `out` in FP8 too, as in baton_quantize_args.out */
  float *scales;        /* with quantized: as in baton_quantize_args */
  const void *shared;   /* null, or bf16 [rows][width]: the shared expert's outputs */
  const void *shared_router; /* null: the weight of `shared` is 1; else bf16 [width]: sigmoid(x * shared_router) */
  const void *x;        /* bf16 [rows][x_stride]: the inputs of shared_router; may be `out` */
  int64_t x_stride;
  float eps;
  int32_t count;
  int32_t rows;
  int32_t width; /* a multiple of 8 */
  int32_t parts; /* with quantized: as in baton_quantize_args */
  int32_t reserved;
} baton_combine_args;

/* Adds the outputs times their weights in f32, in the order of the slots, the shared expert last. With `residual`, the
 * sum is the delta of baton_add_rms_norm, but is not rounded before the addition. Without `residual`, `out` gets the
 * sum. With PDL, the kernel reads `weights`, `residual` and `norm` before the preceding kernel has completed. So an
 * older kernel must have written them. */
BATON_API int32_t baton_combine_experts(const baton_combine_args *args, void *stream);

#endif
