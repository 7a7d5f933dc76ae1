/* Collectives between the GPUs of a group: a part of the C ABI, with the rules of baton_kernels.h.
 *
 * Every rank has an arena: device memory of the plain allocator, exported by CUDA IPC, mapped by all other ranks, and
 * initialized by baton_group_reset before the first call. All ranks make the same calls in the same order. Addresses
 * never change, so graphs need no registration. The half of the arena that a call uses is read from device memory.
 */
#ifndef BATON_COLLECTIVE_H
#define BATON_COLLECTIVE_H

#include "baton_kernels.h"

#define BATON_GROUP_RANKS_MAX 8

/* 96 bytes. */
typedef struct {
  void *arenas[BATON_GROUP_RANKS_MAX]; /* of every rank, as mapped here */
  int64_t arena_bytes;                 /* of each arena: result of baton_group_arena_bytes */
  uint32_t *fault;                     /* host memory that the device can write: not 0 once a wait timed out */
  int64_t timeout_ns;                  /* time-out of a wait for a peer; above 0 */
  int32_t rank;
  int32_t ranks; /* 2, 4 or 8 */
} baton_group;

/* 80 bytes. */
typedef struct {
  const void *x;      /* [rows][x_stride] of 4 bytes each: this rank's columns */
  int64_t x_stride;
  void *out;          /* [rows][out_stride]: all columns; not x */
  int64_t out_stride;
  int32_t firsts[BATON_GROUP_RANKS_MAX + 1]; /* rank r has the columns from firsts[r] up to firsts[r + 1] */
  int32_t rows;
  int32_t reserved[2];
} baton_gather_args;

typedef enum {
  BATON_ALL_REDUCE_AUTO = 0,
  BATON_ALL_REDUCE_ONE_SHOT = 1, /* every rank sends its message to every rank */
  BATON_ALL_REDUCE_TWO_SHOT = 2  /* reduce-scatter, then all-gather; without a norm */
} baton_all_reduce_algorithm;

/* 56 bytes. */
typedef struct {
  const void *x;       /* T [rows][width] */
  void *out;           /* T [rows][width]; may be x */
  float *residual;     /* null, or [rows][width]: the result is added to it, and out is its norm */
  const float *weight; /* [width], of the norm */
  float eps;
  int32_t dtype;
  int32_t rows;
  int32_t width; /* a multiple of 8 */
  int32_t algorithm;
  int32_t pdl;   /* 1: may start before the preceding kernel of the stream has completed, and waits for it */
} baton_all_reduce_args;

/* Returns the bytes of an arena for messages of up to `message_bytes` of x. */
BATON_API int64_t baton_group_arena_bytes(int32_t ranks, int64_t message_bytes);
/* Resets this rank's arena: fills all words but the first few with 0xff. The caller resets `fault`. All ranks pass a
 * barrier before and after, with no call in flight. Not in a graph. */
BATON_API int32_t baton_group_reset(const baton_group *group, void *stream);
/* Aborts the waits of calls in flight and of later calls, until the next reset. `stream` is not the stream of these
 * calls. */
BATON_API int32_t baton_group_stop(const baton_group *group, void *stream);
/* out = the sum of all ranks' x, in f32 in the order of the ranks: bitwise equal on all ranks. Without a norm, the sum
 * is rounded to T once. With a norm, residual[row] += sum, then out = residual[row] / sqrt(mean of its squares + eps) *
 * weight; only two-shot rounds the sum before the addition. BATON_TOO_SMALL for messages larger than the arenas allow.
 * A wait of more than timeout_ns is aborted: `fault` is set, results are undefined, and every later call returns
 * at once until all ranks have reset. */
BATON_API int32_t baton_all_reduce(const baton_group *group, const baton_all_reduce_args *args, void *stream);
/* Gathers all ranks' columns of every row, in one kernel with as many rounds as the arenas need. Waits as an all-reduce
 * does. */
BATON_API int32_t baton_group_gather(const baton_group *group, const baton_gather_args *args, void *stream);

/* Returns the bytes of scratch for this number of padded samples: with 1 rank for baton_sample, otherwise for
 * baton_group_sample. */
BATON_API uint64_t baton_group_sample_scratch_bytes(int32_t ranks, int32_t samples_max, int32_t vocabulary);
/* baton_sample with logits sharded over the ranks of a group: `args->logits` has this rank's tokens. Rank r has the
 * tokens from firsts[r] up to firsts[r + 1] (ranks + 1 numbers in host memory), in whole runs of 1,024 except at the
 * end of the vocabulary. `args->vocabulary` counts the tokens of all ranks. Results are bitwise equal on all ranks, and
 * equal to those of baton_sample over the whole rows. `detail` of a result is 1 if the row's logits were gathered.
 * After an aborted wait, results are undefined, and some may be those of an earlier call. */
BATON_API int32_t baton_group_sample(const baton_group *group, const baton_pool *pool, const baton_step *step,
                                     const baton_sample_args *args, const int32_t *firsts, void *stream);

#endif
