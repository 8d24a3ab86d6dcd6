/* The matrix kernel and the linear layers: AMX where there is AMX, else AVX-512 or whatever the compiler makes of vectors. */
#include "engine.h"
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAVE_AMX 1
#else
#define HAVE_AMX 0
#endif

enum { LEAD = 96 }; /* rows of a pair of panels that are asked for in advance: 12 kB */

static int use_amx = 0;

int enable_tiles(void) {
#if HAVE_AMX
    use_amx = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#endif
    return use_amx;
}

void begin_tiles(void) {
#if HAVE_AMX
    if (!use_amx) return;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc does not know that the next instruction reads it */
    _tile_loadconfig(&config);
#endif
}

void end_tiles(void) {
#if HAVE_AMX
    if (use_amx) _tile_release();
#endif
}

#if HAVE_AMX
static inline void prefetch_tiles(const uint32_t *b0, const uint32_t *b1, int b_stride) {
    for (int i = 0; i < 16; i++) _mm_prefetch((const char *)(b0 + i * b_stride), _MM_HINT_T0);
    for (int i = 0; i < 16; i++) _mm_prefetch((const char *)(b1 + i * b_stride), _MM_HINT_T0);
}

/* Tiles: 0-3 results (2 row blocks x 2 panels), 4-5 A, 6-7 B. Rows are always computed in sixteens; the caller's A has them. */
#define AMX_KERNEL(NAME, DOT)                                                                                              \
    static void NAME(const uint32_t *a, int lda, int two_rows, const uint32_t *const *b, int panels, int panel, int two_panels,  \
                     int segments, int words, int b_stride, float *c, int ldc, int accumulate, const uint32_t *const *ahead) { \
        const uint32_t *a1 = a + 16 * lda;                                                                                 \
        float *c1 = c + 16 * ldc;                                                                                          \
        if (accumulate) {                                                                                                  \
            _tile_loadd(0, c, ldc * 4);                                                                                    \
            if (two_panels) _tile_loadd(1, c + 16, ldc * 4);                                                               \
            if (two_rows) _tile_loadd(2, c1, ldc * 4);                                                                     \
            if (two_rows && two_panels) _tile_loadd(3, c1 + 16, ldc * 4);                                                  \
        } else {                                                                                                           \
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);                                                    \
        }                                                                                                                  \
        for (int s = 0; s < segments; s++) {                                                                               \
            const uint32_t *b0 = b[s * panels + panel], *b1 = two_panels ? b[s * panels + panel + 1] : b0;                 \
            const uint32_t *next = ahead ? ahead[s * panels + panel] : 0;                                                  \
            const uint32_t *next1 = ahead && two_panels ? ahead[s * panels + panel + 1] : next;                            \
            for (int w = 0; w < words; w += 16, a += 16, a1 += 16) {                                                       \
                if (ahead) prefetch_tiles(next + w * b_stride, next1 + w * b_stride, b_stride);                                                  \
                _tile_loadd(4, a, lda * 4);                                                                                \
                _tile_loadd(6, b0 + w * b_stride, b_stride * 4);                                                           \
                DOT(0, 4, 6);                                                                                              \
                if (two_panels) {                                                                                          \
                    _tile_loadd(7, b1 + w * b_stride, b_stride * 4);                                                       \
                    DOT(1, 4, 7);                                                                                          \
                }                                                                                                          \
                if (two_rows) {                                                                                            \
                    _tile_loadd(5, a1, lda * 4);                                                                           \
                    DOT(2, 5, 6);                                                                                          \
                    if (two_panels) DOT(3, 5, 7);                                                                          \
                }                                                                                                          \
            }                                                                                                              \
        }                                                                                                                  \
        _tile_stored(0, c, ldc * 4);                                                                                       \
        if (two_panels) _tile_stored(1, c + 16, ldc * 4);                                                                  \
        if (two_rows) _tile_stored(2, c1, ldc * 4);                                                                        \
        if (two_rows && two_panels) _tile_stored(3, c1 + 16, ldc * 4);                                                     \
    }
AMX_KERNEL(amx_bf16, _tile_dpbf16ps)
AMX_KERNEL(amx_int8, _tile_dpbusd)
#endif

/* One word of A against one word row of a panel. Bytes: A unsigned, B signed. */
static inline __attribute__((always_inline)) v16 dot(int kind, v16 acc, uint32_t a, v16u b) {
    if (kind == F32) {
        float f;
        memcpy(&f, &a, 4);
        return acc + f * (v16)b;
    }
    if (kind == BF16) {
#if defined(__AVX512BF16__)
        return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#else
        float low = from_bf16((uint16_t)a), high = from_bf16((uint16_t)(a >> 16));
        acc += low * (v16)(b << 16);
        return acc + high * (v16)(b & 0xffff0000u);
#endif
    }
#if defined(__AVX512VNNI__)
    return (v16)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32((int)a), (__m512i)b);
#else
    v16i sum = (v16i)acc;
    for (int i = 0; i < 4; i++) sum += (int32_t)((a >> (8 * i)) & 255) * ((v16i)(b << (24 - 8 * i)) >> 24);
    return (v16)sum;
#endif
}

static inline __attribute__((always_inline)) void block(int kind, int rows, int columns, const uint32_t *a, int lda,
                                                        const uint32_t *const *b, int panels, int segments, int words,
                                                        int b_stride, float *c, int ldc, int accumulate,
                                                        const uint32_t *const *ahead) {
    v16 acc[6][4];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) acc[i][j] = accumulate ? *(v16 *)(c + i * ldc + j * PANEL) : (v16){0};
    for (int s = 0; s < segments; s++, b += panels, ahead += ahead ? panels : 0) {
        for (int w = 0; w < words; w++, a++) {
            v16u column[4];
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) {
                column[j] = *(const v16u *)(b[j] + (int64_t)w * b_stride);
                if (ahead) __builtin_prefetch(ahead[j] + (int64_t)w * b_stride);
            }
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
                for (int j = 0; j < columns; j++) acc[i][j] = dot(kind, acc[i][j], a[i * lda], column[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) *(v16 *)(c + i * ldc + j * PANEL) = acc[i][j];
}

/* Registers decide the block: 6 x 4 with 32 vectors of 512 bits, 6 x 1 otherwise. */
#if defined(__AVX512F__)
enum { MAX_COLUMNS = 4 };
#else
enum { MAX_COLUMNS = 1 };
#endif

#define BLOCK(R, C) block(kind, R, C, a, lda, b, panels, segments, words, b_stride, c, ldc, accumulate, next)
static inline __attribute__((always_inline)) void vector_multiply(int kind, const uint32_t *a, int lda, int rows,
                                                                  const uint32_t *const *b, int panels, int segments,
                                                                  int words, int b_stride, float *c, int ldc, int accumulate,
                                                                  const uint32_t *const *ahead) {
    int wide = panels == 4 && MAX_COLUMNS == 4;
    const uint32_t *const *b_all = b;
    float *c_all = c;
    for (int i = 0; i < rows; i += 6, a += 6 * lda, c_all += 6 * ldc) {
        int left = rows - i < 6 ? rows - i : 6;
        for (int j = 0; j < panels; j += wide ? 4 : 1) {
            const uint32_t *const *next = ahead && i == 0 ? ahead + j : 0;
            b = b_all + j, c = c_all + j * PANEL;
            switch (wide * 8 + left) {
                case 1: BLOCK(1, 1); break;
                case 2: BLOCK(2, 1); break;
                case 3: BLOCK(3, 1); break;
                case 4: BLOCK(4, 1); break;
                case 5: BLOCK(5, 1); break;
                case 6: BLOCK(6, 1); break;
                case 9: BLOCK(1, 4); break;
                case 10: BLOCK(2, 4); break;
                case 11: BLOCK(3, 4); break;
                case 12: BLOCK(4, 4); break;
                case 13: BLOCK(5, 4); break;
                case 14: BLOCK(6, 4); break;
            }
        }
    }
}

void multiply(int kind, const uint32_t *a, int lda, int rows, const uint32_t *const *b, int panels, int segments, int words,
              int b_stride, float *c, int ldc, int accumulate, const uint32_t *const *ahead) {
#if HAVE_AMX
    if (use_amx && kind != F32 && words % 16 == 0) {
        for (int j = 0; j < panels; j += 2)
            (kind == BF16 ? amx_bf16 : amx_int8)(a, lda, rows > 16, b, panels, j, j + 1 < panels, segments, words, b_stride,
                                                 c + j * PANEL, ldc, accumulate, ahead);
        return;
    }
#endif
    if (kind == F32) vector_multiply(F32, a, lda, rows, b, panels, segments, words, b_stride, c, ldc, accumulate, ahead);
    if (kind == BF16) vector_multiply(BF16, a, lda, rows, b, panels, segments, words, b_stride, c, ldc, accumulate, ahead);
    if (kind == INT8) vector_multiply(INT8, a, lda, rows, b, panels, segments, words, b_stride, c, ldc, accumulate, ahead);
}

/* ---- linear layers: y = x * weight + bias, then stored, added to the residual, or gated ---- */

enum { ROWS_PER_CHUNK = 256 };

static int panels_per_chunk(const Op *op) { return op->n >= 2048 ? 8 : op->epilogue == GLU || op->n >= 512 ? 4 : 2; }

int64_t linear_chunks(const Step *step, const Op *op) {
    return ceil_div(ceil_div(op->n, PANEL), panels_per_chunk(op)) * ceil_div(num_rows_of(step, op), ROWS_PER_CHUNK);
}

static v16 activate(int activation, v16 x) {
    if (activation == SILU) return x / (1.0f + vexp(-x));
    return 0.5f * x * (1.0f + vtanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

/* Results of one row and panel as floats: integer sums are rescaled, the bias is added. */
static inline v16 finish(const Op *op, const float *c, int64_t column, float row_scale) {
    v16 y = *(const v16 *)c;
    if (op->kind == INT8) {
        v16i sum = (v16i)y - *(const v16i *)((const int32_t *)op->correction + column);
        y = __builtin_convertvector(sum, v16) * (row_scale * *(const v16 *)((const float *)op->scale + column));
    }
    if (op->bias) y += *(const v16 *)((const float *)op->bias + column);
    return y;
}

static void write_row(const Step *step, const Op *op, const float *c, int64_t row, int64_t first_panel, int panels) {
    float row_scale = op->kind == INT8 ? ((const float *)step->buffers[op->row_scale].data)[row] : 1.0f;
    char *out = row_of(step, op->target, row);
    if (op->epilogue == GLU) { /* panels alternate: gate, up */
        for (int j = 0; j < panels; j += 2) {
            int64_t column = (first_panel + j) * PANEL;
            v16 y = activate(op->activation, finish(op, c + j * PANEL, column, row_scale)) *
                    finish(op, c + (j + 1) * PANEL, column + PANEL, row_scale);
            if (op->target_kind == BF16) store_bf16((uint16_t *)out + column / 2, y);
            else *(v16 *)((float *)out + column / 2) = y;
        }
        return;
    }
    for (int j = 0; j < panels; j++) {
        int64_t column = (first_panel + j) * PANEL;
        v16 y = finish(op, c + j * PANEL, column, row_scale) * op->factor;
        float *to = (float *)out + column;
        if (op->softcap > 0) y = vtanh(y / op->softcap) * op->softcap;
        if (column + PANEL <= op->n) {
            if (op->epilogue == ADD) y += *(v16 *)to;
            *(v16 *)to = y;
        } else {
            for (int i = 0; column + i < op->n; i++) to[i] = op->epilogue == ADD ? to[i] + y[i] : y[i];
        }
    }
}

void linear_chunk(const Step *step, const Op *op, int64_t chunk) {
    int64_t num_panels = ceil_div(op->n, PANEL), wide = panels_per_chunk(op), across = ceil_div(num_panels, wide);
    int64_t first_panel = chunk % across * wide, end_panel = first_panel + wide < num_panels ? first_panel + wide : num_panels;
    int64_t first_row = chunk / across * ROWS_PER_CHUNK, rows = num_rows_of(step, op);
    int64_t end_row = first_row + ROWS_PER_CHUNK < rows ? first_row + ROWS_PER_CHUNK : rows;
    const Buffer *source = &step->buffers[op->source];
    int words = words_per(op->kind, op->k), lda = (int)(source->stride / 4);
    float c[ROWS * COLUMNS] __attribute__((aligned(64)));
    for (int64_t panel = first_panel; panel < end_panel; panel += 4) {
        int panels = end_panel - panel < 4 ? (int)(end_panel - panel) : 4;
        const uint32_t *b[4], *ahead[4];
        for (int j = 0; j < panels; j++) {
            b[j] = (const uint32_t *)op->weight + (panel + j) / 2 * words * PAIR + (panel + j) % 2 * PANEL;
            ahead[j] = b[j] + LEAD * PAIR;
        }
        for (int64_t row = first_row; row < end_row; row += ROWS) {
            int count = end_row - row < ROWS ? (int)(end_row - row) : ROWS;
            const uint32_t *a = (const uint32_t *)((const char *)source->data + row * source->stride);
            multiply(op->kind, a, lda, count, b, panels, 1, words, PAIR, c, COLUMNS, 0, row == first_row ? ahead : 0);
            for (int i = 0; i < count; i++) write_row(step, op, c + i * COLUMNS, row + i, panel, panels);
        }
    }
}
