/* Weights [n][k], as stored on disk, into pairs of panels. Two matrices may be dealt out panel by panel. */
#include "engine.h"

static float element(const void *data, int kind, int64_t i) {
    if (kind == F32) return ((const float *)data)[i];
    return from_bf16(((const uint16_t *)data)[i]);
}

static uint32_t *panel_of(uint32_t *target, int64_t panel, int64_t words) {
    return target + panel / 2 * words * PAIR + panel % 2 * PANEL;
}

/* Panel p of the matrix goes to panel first + p * every of the target, which is zero. */
void pack_weight(const void *weight, int kind, int64_t n, int64_t k, int target_kind, int64_t first, int64_t every,
                 uint32_t *target) {
    int64_t words = words_per(target_kind, k), per = target_kind == F32 ? 1 : 2;
    for (int64_t p = 0; p < ceil_div(n, PANEL); p++) {
        uint32_t *panel = panel_of(target, first + p * every, words);
        for (int64_t c = 0; c < PANEL && p * PANEL + c < n; c++) {
            int64_t row = (p * PANEL + c) * k;
            if (target_kind == F32)
                for (int64_t i = 0; i < k; i++) ((float *)panel)[i * PAIR + c] = element(weight, kind, row + i);
            else if (kind == BF16)
                for (int64_t i = 0; i < k; i++)
                    ((uint16_t *)panel)[(i / per * PAIR + c) * per + i % per] = ((const uint16_t *)weight)[row + i];
            else
                for (int64_t i = 0; i < k; i++)
                    ((uint16_t *)panel)[(i / per * PAIR + c) * per + i % per] = to_bf16(element(weight, kind, row + i));
        }
    }
}

/* The same to signed bytes, one scale per row. */
void pack_weight_int8(const void *weight, int kind, int64_t n, int64_t k, int64_t first, int64_t every, uint32_t *target,
                      float *scale) {
    int64_t words = words_per(INT8, k);
    for (int64_t p = 0; p < ceil_div(n, PANEL); p++) {
        int64_t to = first + p * every;
        int8_t *panel = (int8_t *)panel_of(target, to, words);
        for (int64_t c = 0; c < PANEL; c++) {
            int64_t row = p * PANEL + c;
            float largest = 0;
            for (int64_t i = 0; row < n && i < k; i++) {
                float x = fabsf(element(weight, kind, row * k + i));
                largest = x > largest ? x : largest;
            }
            float inverse = 127.0f / largest;
            for (int64_t i = 0; largest > 0 && i < k; i++)
                panel[(i / 4 * PAIR + c) * 4 + i % 4] = (int8_t)lrintf(element(weight, kind, row * k + i) * inverse);
            scale[to * PANEL + c] = largest / 127.0f;
        }
    }
}
