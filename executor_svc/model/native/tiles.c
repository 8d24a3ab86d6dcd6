/* The matrix kernel on AMX tiles: pairs of bfloat16. Where there is no AMX, enable_tiles says so and nothing else is called. */
#include "engine.h"
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if PAIRED && defined(__AMX_TILE__) && defined(__AMX_BF16__)
static int use_amx = 0;

int enable_tiles(void) {
    use_amx = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return use_amx;
}

int tiles_enabled(void) { return use_amx; }

void begin_tiles(void) {
    if (!use_amx) return;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc does not know that the next instruction reads it */
    _tile_loadconfig(&config);
}

void end_tiles(void) {
    if (use_amx) _tile_release();
}

static inline void prefetch_tiles(const uint32_t *b0, const uint32_t *b1, int b_stride) {
    for (int i = 0; i < 16; i++) _mm_prefetch((const char *)(b0 + i * b_stride), _MM_HINT_T0);
    for (int i = 0; i < 16; i++) _mm_prefetch((const char *)(b1 + i * b_stride), _MM_HINT_T0);
}

/* Tiles: 0-3 results (2 row blocks x 2 panels), 4-5 A, 6-7 B. Rows are always computed in sixteens; the caller's A has them. */
static void two_by_two(const uint32_t *a, int lda, int two_rows, const uint32_t *const *b, int panels, int panel, int two_panels,
                 int segments, int words, int b_stride, float *c, int ldc, int accumulate, const uint32_t *const *ahead) {
    const uint32_t *a1 = a + 16 * lda;
    float *c1 = c + 16 * ldc;
    if (accumulate) {
        _tile_loadd(0, c, ldc * 4);
        if (two_panels) _tile_loadd(1, c + 16, ldc * 4);
        if (two_rows) _tile_loadd(2, c1, ldc * 4);
        if (two_rows && two_panels) _tile_loadd(3, c1 + 16, ldc * 4);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (int s = 0; s < segments; s++) {
        const uint32_t *b0 = b[s * panels + panel], *b1 = two_panels ? b[s * panels + panel + 1] : b0;
        const uint32_t *next = ahead ? ahead[s * panels + panel] : 0;
        const uint32_t *next1 = ahead && two_panels ? ahead[s * panels + panel + 1] : next;
        for (int w = 0; w < words; w += 16, a += 16, a1 += 16) {
            if (ahead) prefetch_tiles(next + w * b_stride, next1 + w * b_stride, b_stride);
            _tile_loadd(4, a, lda * 4);
            _tile_loadd(6, b0 + w * b_stride, b_stride * 4);
            _tile_dpbf16ps(0, 4, 6);
            if (two_panels) {
                _tile_loadd(7, b1 + w * b_stride, b_stride * 4);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (two_rows) {
                _tile_loadd(5, a1, lda * 4);
                _tile_dpbf16ps(2, 5, 6);
                if (two_panels) _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _tile_stored(0, c, ldc * 4);
    if (two_panels) _tile_stored(1, c + 16, ldc * 4);
    if (two_rows) _tile_stored(2, c1, ldc * 4);
    if (two_rows && two_panels) _tile_stored(3, c1 + 16, ldc * 4);
}

/* Up to sixteen rows leave room for four panels at once: A is loaded half as often, B is read in two streams. */
static void one_by_four(const uint32_t *a, int lda, const uint32_t *const *b, int segments, int words, int b_stride, float *c,
                 int ldc, int accumulate, const uint32_t *const *ahead) {
    if (accumulate) {
        _tile_loadd(0, c, ldc * 4);
        _tile_loadd(1, c + 16, ldc * 4);
        _tile_loadd(2, c + 32, ldc * 4);
        _tile_loadd(3, c + 48, ldc * 4);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (int s = 0; s < segments; s++, b += 4) {
        for (int w = 0; w < words; w += 16, a += 16) {
            int64_t at = (int64_t)w * b_stride;
            if (ahead) prefetch_tiles(ahead[4 * s] + at, ahead[4 * s + 1] + at, b_stride);
            _tile_loadd(4, a, lda * 4);
            _tile_loadd(5, b[0] + at, b_stride * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, b[1] + at, b_stride * 4);
            _tile_dpbf16ps(1, 4, 6);
            if (ahead) prefetch_tiles(ahead[4 * s + 2] + at, ahead[4 * s + 3] + at, b_stride);
            _tile_loadd(7, b[2] + at, b_stride * 4);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, b[3] + at, b_stride * 4);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
    _tile_stored(2, c + 32, ldc * 4);
    _tile_stored(3, c + 48, ldc * 4);
}

void tile_multiply(const uint32_t *a, int lda, int rows, const uint32_t *const *b, int panels, int segments, int words,
                   int b_stride, float *c, int ldc, int accumulate, const uint32_t *const *ahead) {
    if (rows <= 16 && panels == 4 && segments == 1 && b_stride == PAIR) {
        one_by_four(a, lda, b, segments, words, b_stride, c, ldc, accumulate, ahead);
        return;
    }
    for (int j = 0; j < panels; j += 2)
        two_by_two(a, lda, rows > 16, b, panels, j, j + 1 < panels, segments, words, b_stride, c + j * PANEL, ldc, accumulate,
                   ahead);
}

#else
int enable_tiles(void) { return 0; }
int tiles_enabled(void) { return 0; }
void begin_tiles(void) {}
void end_tiles(void) {}
void tile_multiply(const uint32_t *a, int lda, int rows, const uint32_t *const *b, int panels, int segments, int words,
                   int b_stride, float *c, int ldc, int accumulate, const uint32_t *const *ahead) {
    (void)a, (void)lda, (void)rows, (void)b, (void)panels, (void)segments, (void)words, (void)b_stride, (void)c, (void)ldc;
    (void)accumulate, (void)ahead;
}
#endif
