/* AMX's tiles and its product of bfloat16, in plain C, as Intel's reference describes them, on a processor that has AVX-512
 * BF16 as emulated by its neighbour. A tile that is not configured, or is read with other sizes, ends the process.
 */
#define EMULATE_BF16 1
#include "emulated_avx512.h"
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define syscall(...) 0 /* the system grants tiles */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

static __thread TileConfig tile_config; /* of a file that includes this: only one uses tiles */
static __thread uint32_t tiles[8][16][16];

static inline void emulated_loadconfig(const void *config) {
    memcpy(&tile_config, config, sizeof tile_config);
    memset(tiles, 0, sizeof tiles);
    if (tile_config.palette != 1) abort();
}
static inline void emulated_check(int t) {
    if (t < 0 || t > 7 || tile_config.palette != 1 || tile_config.rows[t] > 16 || tile_config.row_bytes[t] > 64) abort();
}
static inline void emulated_loadd(int t, const void *base, int64_t stride) {
    emulated_check(t);
    memset(tiles[t], 0, sizeof tiles[t]);
    for (int row = 0; row < tile_config.rows[t]; row++)
        memcpy(tiles[t][row], (const char *)base + row * stride, tile_config.row_bytes[t]);
}
static inline void emulated_stored(int t, void *base, int64_t stride) {
    emulated_check(t);
    for (int row = 0; row < tile_config.rows[t]; row++)
        memcpy((char *)base + row * stride, tiles[t][row], tile_config.row_bytes[t]);
}
static inline void emulated_zero(int t) {
    emulated_check(t);
    memset(tiles[t], 0, sizeof tiles[t]);
}
/* c[m][n] += a[m][k] . b[k][n], pairs of bfloat16: both products, then their sum. */
static inline void emulated_dpbf16ps(int c, int a, int b) {
    emulated_check(a), emulated_check(b), emulated_check(c);
    for (int m = 0; m < tile_config.rows[c]; m++)
        for (int k = 0; k < tile_config.row_bytes[a] / 4; k++)
            for (int n = 0; n < tile_config.row_bytes[c] / 4; n++) {
                uint32_t x = tiles[a][m][k], y = tiles[b][k][n];
                float sum;
                memcpy(&sum, &tiles[c][m][n], 4);
                sum += emulated_widen((uint16_t)x) * emulated_widen((uint16_t)y) +
                       emulated_widen((uint16_t)(x >> 16)) * emulated_widen((uint16_t)(y >> 16));
                memcpy(&tiles[c][m][n], &sum, 4);
            }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_loadconfig(config)
#define _tile_release() memset(&tile_config, 0, sizeof tile_config)
#define _tile_loadd(t, base, stride) emulated_loadd(t, base, stride)
#define _tile_stored(t, base, stride) emulated_stored(t, base, stride)
#define _tile_zero(t) emulated_zero(t)
#define _tile_dpbf16ps(c, a, b) emulated_dpbf16ps(c, a, b)
