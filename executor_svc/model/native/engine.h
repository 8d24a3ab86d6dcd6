/* The native decoder engine: a tape of operations run by a few threads over one step's tokens.
 *
 * Numbers live in 32-bit words: a word holds one float, two bfloat16 or four bytes, so one matrix kernel serves all three.
 * What a matrix is multiplied by depends on the processor. One that multiplies bfloat16 (PAIRED) gets bfloat16, in words
 * like the matrix's; bytes become bfloat16 on their way. Any other gets floats, and for bytes 16-bit integers (I16), both
 * two words for a word of the matrix.
 * Matrices that are multiplied from the right (weights, keys, values) are stored in panels of 16 columns: row w of a panel
 * holds, for each of its 16 columns, the w-th word along the inner dimension. Weights keep two panels side by side, so that
 * reading them is one stream.
 *
 * Law: what is computed for a token depends on that token's sequence alone, never on its neighbours in the step. Every sum
 * runs in an order fixed by absolute positions, so a request gives the same bits alone, batched, chunked or resumed.
 */
#ifndef STEPWIRE_ENGINE_H
#define STEPWIRE_ENGINE_H

#include <stdatomic.h>
#include "vectors.h"

#if !defined(PAIRED)
#if defined(__AVX512BF16__)
#define PAIRED 1
#else
#define PAIRED 0
#endif
#endif

enum { PANEL = 16, PAIR = 32, ROWS = 32, COLUMNS = 64, GROUP = 32, TILE = 128, MAX_HEAD_DIM = 256 };
enum kind { F32 = 0, BF16 = 1, INT8 = 2, F16 = 3, I16 = 4 };
enum code { EMBED, NORM, LINEAR, ROPE, ATTENTION, QUANTISE, GATHER, NUM_CODES };
enum epilogue { STORE, ADD, GLU };
enum activation { SILU, GELU_TANH };

/* One operation. Pointers are parameters; `source`, `target`, `row_scale` name buffers of the step. Mirrors native.py. */
typedef struct {
    int32_t code, kind, epilogue, activation;
    int32_t source, target, row_scale, layer;
    int32_t few;          /* the rows are those of logits_index, already gathered */
    int32_t target_kind;  /* element type written */
    int64_t n, k;         /* outputs, inputs */
    const void *weight, *bias, *scale;
    const float *cosine, *sine, *q_norm, *k_norm;
    int64_t rope_dim, window; /* 0: none */
    float epsilon, factor, softcap, unused;
} Op;

typedef struct {
    void *data;
    int64_t stride; /* bytes between rows */
} Buffer;

typedef struct {
    const int32_t *token_ids, *positions, *cu_seqlens, *seq_lens, *block_tables, *logits_index;
    const int64_t *slot_mapping;
    void *const *key_pages, *const *value_pages; /* per layer */
    const Buffer *buffers;
    int64_t num_tokens, num_rows, num_logits, table_stride, block_size, num_blocks;
    int64_t num_heads, num_kv_heads, head_dim, vocab_size, max_position, kv_kind, full_norm, num_threads;
    int64_t *nanoseconds; /* per code, may be null */
} Step;

/* Queries attended together: tokens [first, first + count) of the step, the first of them at `position`. All of one row; or,
 * where `shared` is not 0, one each of as many rows, which begin with the same blocks: `shared` positions, whole tiles. */
typedef struct {
    int32_t row, first, count, position, shared;
} Query;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int words_per(int kind, int64_t k) { return (int)(kind == F32 ? k : kind == INT8 ? ceil_div(k, 64) * 16 : ceil_div(k, 32) * 16); }
/* Words of the left side for one word of the matrix. */
static inline int factors_per_word(int kind) { return kind == F32 || PAIRED ? 1 : 2; }

/* C[rows][panels * 16] (+)= A[rows][segments * words] * B, panels <= 4, B given as one pointer per segment and panel. `ahead`,
 * if not null, points like B to what will be read later: it is fetched line by line meanwhile. With tiles, rows <= 32, and A
 * and C have room for sixteen or thirty-two. Sums of kind INT8 are integers. */
void multiply(int kind, const uint32_t *a, int lda, int rows, const uint32_t *const *b, int panels, int segments, int words,
              int b_stride, float *c, int ldc, int accumulate, const uint32_t *const *ahead);
int64_t linear_chunks(const Step *step, const Op *op);
void linear_chunk(const Step *step, const Op *op, int64_t chunk);
void embed_chunk(const Step *step, const Op *op, int64_t chunk);
void norm_chunk(const Step *step, const Op *op, int64_t chunk);
void gather_chunk(const Step *step, const Op *op, int64_t chunk);
void quantise_chunk(const Step *step, const Op *op, int64_t chunk);
void rope_chunk(const Step *step, const Op *op, int64_t chunk);
/* `next` and `next_head`: what this thread will probably do after it, or null. */
void attention_chunk(const Step *step, const Op *op, const Query *query, int head, const Query *next, int next_head);
int64_t queries_per_chunk(const Step *step);
int enable_tiles(void); /* once per process: may this process use AMX? */
int tiles_enabled(void);
void begin_tiles(void); /* per thread, before multiply */
void end_tiles(void);
void tile_multiply(const uint32_t *a, int lda, int rows, const uint32_t *const *b, int panels, int segments, int words,
                   int b_stride, float *c, int ldc, int accumulate, const uint32_t *const *ahead);

enum { TOKENS_PER_CHUNK = 4 };

static inline int64_t num_rows_of(const Step *step, const Op *op) { return op->few ? step->num_logits : step->num_tokens; }
static inline char *row_of(const Step *step, int buffer, int64_t row) {
    return (char *)step->buffers[buffer].data + row * step->buffers[buffer].stride;
}

#endif
