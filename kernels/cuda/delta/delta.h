/* Linear attention (Gated DeltaNet) and its recurrent states: a part of the C ABI, with the rules of baton_kernels.h.
 * The places of a state's rows in blocks are those of kernels/src/layout/states.rs. */
#ifndef BATON_DELTA_H
#define BATON_DELTA_H

#include "baton_kernels.h"

typedef struct baton_delta_args {
  const void *projected;  /* [rows][projected_stride]: queries, keys, values, output gates */
  const void *rates;      /* [rows][rates_stride]: b of all value heads, then a */
  const float *conv;      /* [channels][taps + 1], the oldest input first; channels: queries, keys, values */
  const float *decay_log; /* [value_heads] */
  const float *time_bias; /* [value_heads] */
  const float *norm;      /* [value_dim] */
  float *mixed;           /* scratch [rows][mixed_stride]: channels, then decay and update rate of each value head */
  void *out;              /* [rows][out_stride] */
  void *blocks;           /* block 0 */
  const int32_t *tables;  /* the first entry of the state in the block table of slot 0 */
  int64_t projected_stride;
  int64_t rates_stride;
  int64_t mixed_stride; /* a multiple of 4 */
  int64_t out_stride;
  int64_t block_bytes;
  int64_t head_bytes; /* bytes of a piece: a KV head of one layer, K or V; a multiple of 16 */
  int32_t table_width;
  int32_t dtype; /* of projected, rates and out */
  int32_t rows;
  int32_t sequences;
  int32_t key_heads;
  int32_t value_heads;
  int32_t key_dim;   /* a multiple of 4 up to 256 */
  int32_t value_dim; /* a multiple of 4 up to 256 */
  int32_t taps;      /* past inputs of the convolution */
  int32_t lanes;     /* KV heads of a block */
  int32_t pieces;    /* pieces of a lane in a block */
  int32_t piece_rows;
  int32_t layer_row; /* the layer's first row in a lane */
  float eps;
} baton_delta_args;

/* Computes linear attention of the step's rows and replaces the states of its sequences. A sequence at position 0
 * starts from zeros. Padding rows get zeros and touch no state. BATON_UNSUPPORTED for other sizes of heads. */
BATON_API int32_t baton_gated_delta(const baton_delta_args *args, const baton_step *step, void *stream);

/* Computes x[row][i] *= sigmoid(gate[row][i]); both are contiguous, width is a multiple of 8. */
BATON_API int32_t baton_apply_gate(int32_t dtype, const void *gate, void *x, int32_t rows, int32_t width, void *stream);

/* Copies block pairs[2i] to block pairs[2i + 1]. The pairs are in host memory and are read before the call returns. No
 * block that is written is in another pair. */
BATON_API int32_t baton_copy_blocks(void *blocks, int64_t block_bytes, const int32_t *pairs, int32_t count,
                                    void *stream);

#endif
