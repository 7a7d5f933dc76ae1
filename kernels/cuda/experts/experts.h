/* Mixtures of experts in bf16: a part of the C ABI, with the rules of baton_kernels.h. An assignment is a row and one of
 * its `count` experts: assignment = row * count + slot. Its position is its place in the list of all assignments by
 * expert, then by row. */
#ifndef BATON_EXPERTS_H
#define BATON_EXPERTS_H

#include "baton_kernels.h"

#define BATON_EXPERTS_MAX 512        /* experts of a layer */
#define BATON_EXPERTS_CHOSEN_MAX 32  /* experts of a row */

/* 120 bytes. */
typedef struct {
  const void *x;        /* bf16 [rows][x_stride]; null with `logits` */
  int64_t x_stride;     /* at least hidden, a multiple of 8 */
  const float *squares; /* null, or as in baton_skinny_gemm_args: x lacks the scale of its norm */
  const void *router;   /* bf16 [experts][hidden] */
  const float *logits;  /* null: x times the router; else f32 [rows][experts], and x is not read */
  int32_t *expert_of;   /* [rows][count]: experts of each row, by falling probability */
  float *weights;       /* [rows][count] */
  float *scales;        /* [rows]: scales of the rows of x; not written with `logits` */
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
  int32_t reserved;
} baton_route_args;

/* Chooses the experts of each row by a softmax in f32 over the logits, the lowest expert among equal probabilities, and
 * lists the assignments by expert. Results of a row do not depend on the other rows. */
BATON_API int32_t baton_route(const baton_route_args *args, void *stream);

/* 104 bytes. */
typedef struct {
  const void *weight;    /* bf16 [n][depth] of expert 0, contiguous */
  int64_t weight_stride; /* elements from one expert's weight to the next, a multiple of 8 */
  const void *x;         /* bf16 [rows][x_stride] (gate and up), or [rows * count][x_stride] by position (down) */
  int64_t x_stride;
  const float *scales;   /* gate and up: null, or a factor of each row of x */
  void *out;             /* gate and up: bf16 [rows * count][n / 2] by position, silu(gate) * up; down: bf16
                            [rows * count][n] by assignment */
  int64_t out_stride;
  const int32_t *offsets; /* of baton_route */
  const int32_t *order;
  int32_t rows;
  int32_t experts;
  int32_t count;
  int32_t n;     /* rows of a weight, a multiple of 8: outputs, or gate rows and then up rows, each a multiple of 8 */
  int32_t depth; /* columns of a weight, a multiple of 8 */
  int32_t is_gate_up;
  int32_t grid; /* maximum CTAs; 0: one per SM */
  int32_t pdl;  /* as in baton_skinny_gemm_args. `offsets` and `order` were written at least two kernels before a call
                   for down */
} baton_expert_gemm_args;

/* Multiplies each row with the weights of its experts. A row's results do not depend on the other rows.
 * BATON_UNSUPPORTED except on compute capability 9.0. */
BATON_API int32_t baton_expert_gemm(const baton_expert_gemm_args *args, void *stream);

/* Adds the experts' outputs (bf16 [rows][count][width]) times their weights in the order of the slots, in f32. With
 * residual (f32 [rows][width]) as baton_add_rms_norm, where the sum is the delta, which is not rounded. With null, out
 * (bf16 [rows][width]) gets the sum, and norm is not read. */
BATON_API int32_t baton_combine_experts(const void *outputs, const float *weights, int32_t count, float *residual,
                                        const float *norm, float eps, void *out, int32_t rows, int32_t width, void *stream);

#endif
