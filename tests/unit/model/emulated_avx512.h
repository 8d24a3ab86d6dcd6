/* The AVX-512 instructions that the native engine uses, in plain C, as Intel's reference describes them: include it before
 * anything else, and the engine's code for such a processor runs on any. The macros say what the processor can do.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VNNI__ 1

typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef int16_t shorts __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));

static inline float emulated_reduce_add_ps(floats x) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}
static inline float emulated_reduce_max_ps(floats x) {
    float most = x[0];
    for (int i = 1; i < 16; i++) most = x[i] > most ? x[i] : most;
    return most;
}
static inline ints emulated_set1_epi32(int value) {
    ints x;
    for (int i = 0; i < 16; i++) x[i] = value;
    return x;
}
static inline ints emulated_madd_epi16(ints a, ints b) {
    shorts x = (shorts)a, y = (shorts)b;
    ints sum;
    for (int i = 0; i < 16; i++) sum[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    return sum;
}
static inline ints emulated_dpwssd_epi32(ints sum, ints a, ints b) { return sum + emulated_madd_epi16(a, b); }
static inline ints emulated_slli_epi16(ints a, int count) {
    shorts x = (shorts)a;
    for (int i = 0; i < 32; i++) x[i] = (int16_t)((uint16_t)x[i] << count);
    return (ints)x;
}
static inline ints emulated_srai_epi16(ints a, int count) {
    shorts x = (shorts)a;
    for (int i = 0; i < 32; i++) x[i] = (int16_t)(x[i] >> count);
    return (ints)x;
}

#undef _mm512_reduce_add_ps
#undef _mm512_reduce_max_ps
#undef _mm512_set1_epi32
#undef _mm512_madd_epi16
#undef _mm512_dpwssd_epi32
#undef _mm512_slli_epi16
#undef _mm512_srai_epi16
#define _mm512_reduce_add_ps(x) emulated_reduce_add_ps((floats)(x))
#define _mm512_reduce_max_ps(x) emulated_reduce_max_ps((floats)(x))
#define _mm512_set1_epi32(x) emulated_set1_epi32(x)
#define _mm512_madd_epi16(a, b) emulated_madd_epi16((ints)(a), (ints)(b))
#define _mm512_dpwssd_epi32(sum, a, b) emulated_dpwssd_epi32((ints)(sum), (ints)(a), (ints)(b))
#define _mm512_slli_epi16(x, count) emulated_slli_epi16((ints)(x), count)
#define _mm512_srai_epi16(x, count) emulated_srai_epi16((ints)(x), count)

#if defined(EMULATE_BF16)
#define __AVX512BF16__ 1

static inline float emulated_widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return fpclassify(value) == FP_SUBNORMAL ? copysignf(0.0f, value) : value;
}
/* To nearest, ties to even; denormals are zero, what is not a number becomes quiet. */
static inline halves emulated_cvtneps_pbh(floats x) {
    halves to;
    for (int i = 0; i < 16; i++) {
        uint32_t bits;
        float value = x[i];
        if (fpclassify(value) == FP_SUBNORMAL) value = copysignf(0.0f, value);
        memcpy(&bits, &value, 4);
        to[i] = isnan(value) ? (uint16_t)(bits >> 16) | 0x40 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
    return to;
}
static inline floats emulated_dpbf16_ps(floats sum, ints a, ints b) {
    for (int i = 0; i < 16; i++) {
        sum[i] = fmaf(emulated_widen((uint16_t)(a[i] >> 16)), emulated_widen((uint16_t)(b[i] >> 16)), sum[i]);
        sum[i] = fmaf(emulated_widen((uint16_t)a[i]), emulated_widen((uint16_t)b[i]), sum[i]);
    }
    return sum;
}
#define _mm512_cvtneps_pbh(x) emulated_cvtneps_pbh((floats)(x))
#define _mm512_dpbf16_ps(sum, a, b) emulated_dpbf16_ps((floats)(sum), (ints)(a), (ints)(b))
#define __m512bh ints
#endif
