/* The wide half of an unfiltered draw: which tokens may still win the exponential race of sampler.py. noise.py defines
 * the bits and is followed to the bit; the weights are only bounded from above, so that no winner is ever left out. The
 * exact race between the few that are left is run in numpy, in float64, whoever chose them.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 1024
#define GROUP 16

static inline uint32_t mix32(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* exp(x) for -87 < x <= 0 to 1e-6 relative: a Taylor polynomial of 2^f, |f| <= 1/2, and an exponent. Below, any number:
 * no arrival time is below 2^-33 and the favourite's is below 23, so a token with x < -26 cannot win.
 */
static inline float exp_of(float x)
{
    float t = x * 1.44269504f;
    float rounded = t + 12582912.0f; /* 1.5 * 2^23: the integer part is in the lowest bits */
    float f = t - (rounded - 12582912.0f);
    float p = 0.000154035304f;
    p = p * f + 0.00133335581f;
    p = p * f + 0.00961812911f;
    p = p * f + 0.0555041087f;
    p = p * f + 0.240226507f;
    p = p * f + 0.693147181f;
    p = p * f + 1.0f;
    int32_t exponent, whole;
    memcpy(&whole, &rounded, 4);
    memcpy(&exponent, &p, 4);
    whole -= 0x4B400000;
    whole = whole < -126 ? -126 : whole;
    exponent += whole * (1 << 23);
    memcpy(&p, &exponent, 4);
    return p;
}

/* For rows 0 .. num_rows - 1, as far as `capacity` entries go: the ids of a row's contenders, ascending, with their
 * log weights (logit - largest) / temperature and their bits; ends[r] is where row r's entries end. Returns how many
 * rows were done; a row that may not fit is not begun.
 *
 * base     uint32 [vocab]: mix32(id * 0x9E3779B1)
 * limits   the largest bits * exp(-log weight) of a contender
 */
int64_t race_contenders(const float *const *logits, int64_t num_rows, int64_t vocab, const float *largest,
                        const float *temperature, const uint64_t *keys, const float *limits, const uint32_t *base,
                        int64_t capacity, int32_t *ids, float *weights, uint32_t *bits, int64_t *ends)
{
    float z[CHUNK];
    uint32_t drawn[CHUNK];
    uint32_t contends[CHUNK] = {0}; /* behind the last token of a chunk: stale, and never believed */
    int64_t end = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        if (capacity - end < vocab)
            return row;
        const uint32_t key = (uint32_t)keys[row], factor = (uint32_t)(keys[row] >> 32) | 1;
        const float most = largest[row], heat = temperature[row], limit = limits[row];
        for (int64_t begin = 0; begin < vocab; begin += CHUNK) {
            const int64_t count = vocab - begin < CHUNK ? vocab - begin : CHUNK;
            const float *from = logits[row] + begin;
            for (int64_t i = 0; i < count; i++) {
                z[i] = (from[i] - most) / heat;
                drawn[i] = mix32((base[begin + i] ^ key) * factor);
                contends[i] = (float)drawn[i] <= exp_of(z[i]) * limit;
            }
            for (int64_t group = 0; group < count; group += GROUP) {
                uint32_t any = 0;
                for (int i = 0; i < GROUP; i++)
                    any |= contends[group + i];
                if (!any)
                    continue;
                for (int64_t i = group; i < group + GROUP && i < count; i++)
                    if (contends[i]) {
                        ids[end] = (int32_t)(begin + i);
                        weights[end] = z[i];
                        bits[end++] = drawn[i];
                    }
            }
        }
        ends[row] = end;
    }
    return num_rows;
}
