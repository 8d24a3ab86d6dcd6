/* Vectors as wide as the machine's registers, and the few functions of them that C lacks. Knows nothing of models. */
#ifndef STEPWIRE_VECTORS_H
#define STEPWIRE_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t veci __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vecu __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vech __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

static inline vec splat(float x) { return x - (vec){0}; }
static inline vec choose(veci mask, vec a, vec b) { return (vec)((mask & (veci)a) | (~mask & (veci)b)); }
static inline vec vmax(vec a, vec b) { return choose(a > b, a, b); }
static inline vec vmin(vec a, vec b) { return choose(a < b, a, b); }
static inline float sum_lanes(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
#endif
}
static inline float max_lanes(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
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
static inline void store_bf16(uint16_t *p, vec x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vecu u = (vecu)x;
    vecu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vecu nan = (vecu)(x != x);
    *(vech *)p = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), vech);
#endif
}

/* exp to about one unit in the last place; 0 below -87.3. */
static inline vec vexp(vec x) {
    veci alive = x > splat(-87.3f);
    x = vmin(vmax(x, splat(-87.3f)), splat(88.7f));
    vec n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    veci power = (__builtin_convertvector(n, veci) + 127) << 23;
    return choose(alive, y * (vec)power, splat(0));
}
static inline vec vtanh(vec x) {
    vec e = vexp(x * 2.0f);
    return 1.0f - 2.0f / (e + 1.0f);
}

#endif
