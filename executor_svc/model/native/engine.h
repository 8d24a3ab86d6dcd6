/* The native decoder engine: a tape of operations run by a few threads over one step's tokens.
 *
 * Numbers live in 32-bit words: a word holds one float, two bfloat16 or four bytes, so one matrix kernel serves all three.
 * Matrices that are multiplied from the right (weights, keys, values) are stored in panels of 16 columns: row w of a panel
 * holds, for each of its 16 columns, the w-th word along the inner dimension. Weights keep two panels side by side, so that
 * reading them is one stream.
 *
 * Law: what is computed for a token depends on that token's sequence alone, never on its neighbours in the step. Every sum
 * runs in an order fixed by absolute positions, so a request gives the same bits alone, batched, chunked or resumed.
 */
#ifndef STEPWIRE_ENGINE_H
#define STEPWIRE_ENGINE_H

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { PANEL = 16, PAIR = 32, ROWS = 32, COLUMNS = 64, GROUP = 32, TILE = 128, MAX_HEAD_DIM = 256 };
enum kind { F32 = 0, BF16 = 1, INT8 = 2, F16 = 3 };
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
    const void *weight, *bias, *scale, *correction;
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

/* Queries attended together: tokens [first, first + count) of the step, all of one row. */
typedef struct {
    int32_t row, first, count, position;
} Query;

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t v16u __attribute__((vector_size(64), aligned(4), may_alias));

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int words_per(int kind, int64_t k) { return (int)(kind == F32 ? k : kind == INT8 ? ceil_div(k, 64) * 16 : ceil_div(k, 32) * 16); }
static inline v16 splat(float x) { return x - (v16){0}; }
static inline v16 choose(v16i mask, v16 a, v16 b) { return (v16)((mask & (v16i)a) | (~mask & (v16i)b)); }
static inline v16 vmax(v16 a, v16 b) { return choose(a > b, a, b); }
static inline v16 vmin(v16 a, v16 b) { return choose(a < b, a, b); }
static inline float sum16(v16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float s = 0;
    for (int i = 0; i < 16; i++) s += x[i];
    return s;
#endif
}
static inline float max16(v16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float m = x[0];
    for (int i = 1; i < 16; i++) m = x[i] > m ? x[i] : m;
    return m;
#endif
}

static inline float from_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
/* Round to nearest even; NaN stays NaN. */
static inline uint16_t to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline void store_bf16(uint16_t *p, v16 x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    for (int i = 0; i < 16; i++) p[i] = to_bf16(x[i]);
#endif
}
static inline v16 load_bf16(const uint16_t *p) {
    v16u u;
    for (int i = 0; i < 16; i++) u[i] = (uint32_t)p[i] << 16;
    return (v16)u;
}

/* exp to about one unit in the last place; 0 below -87.3. */
static inline v16 vexp(v16 x) {
    v16i alive = x > splat(-87.3f);
    x = vmin(vmax(x, splat(-87.3f)), splat(88.7f));
    v16 n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    v16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    v16 y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    v16i power = (__builtin_convertvector(n, v16i) + 127) << 23;
    return choose(alive, y * (v16)power, splat(0));
}
static inline v16 vtanh(v16 x) {
    v16 e = vexp(x * 2.0f);
    return 1.0f - 2.0f / (e + 1.0f);
}

/* C[rows <= 32][panels * 16] (+)= A[rows][segments * words] * B, B given as one pointer per segment and panel. `ahead`,
 * if not null, points like B to what will be read later: it is fetched line by line meanwhile. */
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
int enable_tiles(void);      /* once per process: may this process use AMX? */
void begin_tiles(void);      /* per thread, before multiply */
void end_tiles(void);

enum { TOKENS_PER_CHUNK = 4 };

static inline int64_t num_rows_of(const Step *step, const Op *op) { return op->few ? step->num_logits : step->num_tokens; }
static inline char *row_of(const Step *step, int buffer, int64_t row) {
    return (char *)step->buffers[buffer].data + row * step->buffers[buffer].stride;
}

#endif
