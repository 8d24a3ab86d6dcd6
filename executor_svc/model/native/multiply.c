/* The matrix kernel: AMX where there is AMX, else blocks of the result kept in registers, in AVX-512, AVX2 or whatever the
 * compiler makes of vectors. Every element is one sum over the inner dimension from its beginning to its end, whatever the
 * block it is computed in.
 */
#include "engine.h"

/* Registers decide the block, in vectors: 6 x 4 of 512 bits, where there are thirty-two of them; 6 x 2, 3 x 4 or 1 x 8 of 256
 * bits; 4 x 4 of 128 bits. */
enum { PER_PANEL = PANEL / LANES, MAX_ROWS = LANES == 4 ? 4 : 6, MAX_VECTORS = LANES == 8 ? 8 : 4 };

static inline __attribute__((always_inline)) float as_float(uint32_t word) {
    float f;
    memcpy(&f, &word, 4);
    return f;
}

/* Sums of pairs: the left side is a pair of 16-bit integers in every lane. */
static inline __attribute__((always_inline)) veci add_products(veci sum, uint32_t pair, veci b) {
#if defined(__AVX512VNNI__)
    return (veci)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32((int)pair), (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (veci)_mm512_madd_epi16(_mm512_set1_epi32((int)pair), (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (veci)_mm256_madd_epi16(_mm256_set1_epi32((int)pair), (__m256i)b);
#else
    return sum + (int16_t)pair * ((b << 16) >> 16) + (int16_t)(pair >> 16) * (b >> 16);
#endif
}

/* Each of four bytes as 16-bit integers: the first and third, the second and fourth. */
static inline __attribute__((always_inline)) veci even_bytes(vecu b) {
#if defined(__AVX512BW__)
    return (veci)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)b, 8), 8);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (veci)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8);
#else
    veci low = (veci)(b << 24) >> 24, high = (veci)(b << 8) >> 24;
    return (low & 0xffff) | (high << 16);
#endif
}
static inline __attribute__((always_inline)) veci odd_bytes(vecu b) {
#if defined(__AVX512BW__)
    return (veci)_mm512_srai_epi16((__m512i)b, 8);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (veci)_mm256_srai_epi16((__m256i)b, 8);
#else
    veci low = (veci)(b << 16) >> 24, high = (veci)b >> 24;
    return (low & 0xffff) | (high << 16);
#endif
}

/* How many steps a word of the matrix takes, and one of them: `part` of a word row times `part` of the left side. */
static inline __attribute__((always_inline)) vec part_of(int kind, vecu b, int part) {
    if (kind == F32 || PAIRED) return (vec)b;
    if (kind == BF16) return part ? (vec)(b & 0xffff0000u) : (vec)(b << 16);
    return part ? (vec)odd_bytes(b) : (vec)even_bytes(b);
}
static inline __attribute__((always_inline)) vec step(int kind, vec sum, uint32_t a, vec b) {
    if (kind == INT8) return (vec)add_products((veci)sum, a, (veci)b);
    if (kind == F32 || !PAIRED) return sum + as_float(a) * b;
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#else
    sum += from_bf16((uint16_t)a) * (vec)((vecu)b << 16);
    return sum + from_bf16((uint16_t)(a >> 16)) * (vec)((vecu)b & 0xffff0000u);
#endif
}

static inline __attribute__((always_inline)) void block(int kind, int rows, int vectors, const uint32_t *a, int lda,
                                                        const uint32_t *const *b, int panels, int segments, int words,
                                                        int b_stride, float *c, int ldc, int accumulate,
                                                        const uint32_t *const *ahead) {
    int factors = factors_per_word(kind);
    int64_t row = (int64_t)lda * 4, step_b = b_stride;
    vec sum[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) sum[i][j] = accumulate ? *(vec *)(c + i * ldc + j * LANES) : (vec){0};
    /* Two pointers reach six rows: base + row * {0, 1, 2} is one address of the processor's. */
    const char *low = (const char *)a, *high = low + 3 * row;
    for (int s = 0; s < segments; s++, b += panels, ahead += ahead ? panels : 0) {
        const uint32_t *from[MAX_VECTORS / PER_PANEL];
#pragma GCC unroll 4
        for (int p = 0; p < vectors / PER_PANEL; p++) from[p] = b[p];
        for (int w = 0; w < words; w++, low += factors * 4, high += factors * 4) {
            if (ahead)
                for (int p = 0; p < vectors / PER_PANEL; p++) __builtin_prefetch(ahead[p] + (int64_t)w * b_stride);
#pragma GCC unroll 2
            for (int part = 0; part < factors; part++) {
                vec column[MAX_VECTORS];
#pragma GCC unroll 8
                for (int j = 0; j < vectors; j++)
                    column[j] = part_of(kind, *(const vecu *)(from[j / PER_PANEL] + j % PER_PANEL * LANES), part);
#pragma GCC unroll 6
                for (int i = 0; i < rows; i++) {
                    uint32_t factor = *(const uint32_t *)((i < 3 ? low : high) + i % 3 * row + part * 4);
#pragma GCC unroll 8
                    for (int j = 0; j < vectors; j++) {
                        sum[i][j] = step(kind, sum[i][j], factor, column[j]);
#if defined(__AVX2__) && !defined(__AVX512F__)
                        if (kind == INT8) __asm__("" : "+v"(sum[i][j])); /* or gcc multiplies first and runs out of registers */
#endif
                    }
                }
            }
#pragma GCC unroll 4
            for (int p = 0; p < vectors / PER_PANEL; p++) from[p] += step_b;
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) *(vec *)(c + i * ldc + j * LANES) = sum[i][j];
}

/* How many panels at once. */
static inline int panels_at_once(int rows, int left) {
    if (LANES == 16) return left >= 4 ? 4 : 1;
    if (LANES == 4) return 1;
    return rows == 1 && left >= 4 ? 4 : rows <= 3 && left >= 2 ? 2 : 1;
}

#define BLOCK(R, P)                                                                                                        \
    case (P) * 8 + (R):                                                                                                    \
        block(kind, R, (P) * PER_PANEL, a, lda, b, panels, segments, words, b_stride, c, ldc, accumulate, ahead);           \
        break

/* Panels outside, rows inside: a panel stays in the cache while all rows pass. Rows are dealt out evenly. */
static inline __attribute__((always_inline)) void vector_multiply(int kind, const uint32_t *a_all, int lda, int rows,
                                                                  const uint32_t *const *b, int panels, int segments,
                                                                  int words, int b_stride, float *c_all, int ldc,
                                                                  int accumulate, const uint32_t *const *ahead_all) {
    int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS, size = rows / blocks, larger = rows % blocks, take;
    for (int j = 0; j < panels; j += take, b += take, c_all += take * PANEL, ahead_all += ahead_all ? take : 0) {
        const uint32_t *a = a_all;
        float *c = c_all;
        take = panels_at_once(size + (larger > 0), panels - j);
        for (int i = 0; i < blocks; i++) {
            const uint32_t *const *ahead = i == 0 ? ahead_all : 0;
            int count = size + (i < larger);
            switch (take * 8 + count) {
                BLOCK(1, 1);
                BLOCK(2, 1);
                BLOCK(3, 1);
                BLOCK(4, 1);
#if defined(__AVX__)
                BLOCK(5, 1);
                BLOCK(6, 1);
                BLOCK(1, 4);
#endif
#if defined(__AVX512F__)
                BLOCK(2, 4);
                BLOCK(3, 4);
                BLOCK(4, 4);
                BLOCK(5, 4);
                BLOCK(6, 4);
#elif defined(__AVX__)
                BLOCK(1, 2);
                BLOCK(2, 2);
                BLOCK(3, 2);
#endif
            }
            a += (int64_t)count * lda, c += (int64_t)count * ldc;
        }
    }
}

void multiply(int kind, const uint32_t *a, int lda, int rows, const uint32_t *const *b, int panels, int segments, int words,
              int b_stride, float *c, int ldc, int accumulate, const uint32_t *const *ahead) {
    if (tiles_enabled() && kind == BF16 && words % 16 == 0)
        tile_multiply(a, lda, rows, b, panels, segments, words, b_stride, c, ldc, accumulate, ahead);
    else if (kind == F32)
        vector_multiply(F32, a, lda, rows, b, panels, segments, words, b_stride, c, ldc, accumulate, ahead);
    else if (kind == BF16)
        vector_multiply(BF16, a, lda, rows, b, panels, segments, words, b_stride, c, ldc, accumulate, ahead);
    else if (!PAIRED)
        vector_multiply(INT8, a, lda, rows, b, panels, segments, words, b_stride, c, ldc, accumulate, ahead);
}
