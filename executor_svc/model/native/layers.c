/* What happens to one token at a time: embedding, norms, quantisation, rotary embedding and the write into the cache. */
#include "engine.h"

static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * ldexpf((float)fraction, -24);
    uint32_t u = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static int64_t end_of(const Step *step, const Op *op, int64_t chunk) {
    int64_t rows = num_rows_of(step, op), end = (chunk + 1) * TOKENS_PER_CHUNK;
    return end < rows ? end : rows;
}

void embed_chunk(const Step *step, const Op *op, int64_t chunk) {
    int64_t end = end_of(step, op, chunk);
    for (int64_t t = chunk * TOKENS_PER_CHUNK; t < end; t++) {
        float *x = (float *)row_of(step, op->target, t);
        int64_t base = step->token_ids[t] * op->n;
        for (int64_t i = 0; i < op->n; i++) {
            float value = op->kind == F32    ? ((const float *)op->weight)[base + i]
                          : op->kind == BF16 ? from_bf16(((const uint16_t *)op->weight)[base + i])
                                             : half_to_float(((const uint16_t *)op->weight)[base + i]);
            x[i] = value * op->factor;
        }
    }
}

/* One partial sum per lane, then their sum: the same order whatever the caller. */
static float mean_square(const float *x, int64_t n) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += *(const vec *)(x + i) * *(const vec *)(x + i);
    float total = sum_lanes(sum);
    for (; i < n; i++) total += x[i] * x[i];
    return total / (float)n;
}

/* The largest integer whose products with bytes, n of them, add up to less than 2^31. */
static float largest_integer(int64_t n) {
    int64_t most = 2147483647 / (127 * n);
    return most < 32767 ? (float)most : 32767.0f;
}

/* Integers q with x = q * scale. Of every four, the first and third come first: the matrix kernel reads them like that. */
static float quantise(const float *x, int64_t n, int16_t *q) {
    vec widest = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) widest = vmax(widest, (vec)(*(const veci *)(x + i) & 0x7fffffff));
    float largest = max_lanes(widest), limit = largest_integer(n);
    for (; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    float inverse = largest > 0 ? limit / largest : 0.0f;
    static const int8_t swap[4] = {0, 2, 1, 3};
    for (i = 0; i + LANES <= n; i += LANES) {
        veci rounded = (veci)(*(const vec *)(x + i) * inverse + 12582912.0f); /* 1.5 * 2^23: the low half is the answer */
        for (int j = 0; j < LANES; j++) q[i + j] = (int16_t)rounded[j / 4 * 4 + swap[j % 4]];
    }
    for (; i < n; i++) q[i / 4 * 4 + swap[i % 4]] = (int16_t)lrintf(x[i] * inverse);
    return largest / limit;
}

static void write_as(const Step *step, const Op *op, int64_t row, const float *x) {
    char *out = row_of(step, op->target, row);
    if (op->target_kind == I16) {
        ((float *)step->buffers[op->row_scale].data)[row] = quantise(x, op->n, (int16_t *)out);
    } else if (op->target_kind == BF16) {
        int64_t i = 0;
        for (; i + LANES <= op->n; i += LANES) store_bf16((uint16_t *)out + i, *(const vec *)(x + i));
        for (; i < op->n; i++) ((uint16_t *)out)[i] = to_bf16(x[i]);
    } else {
        memcpy(out, x, op->n * 4);
    }
}

/* target = norm(source), or target += factor * norm(source) for norms that close a branch. No weight: only the conversion. */
void norm_chunk(const Step *step, const Op *op, int64_t chunk) {
    int64_t end = end_of(step, op, chunk);
    float y[op->n];
    for (int64_t t = chunk * TOKENS_PER_CHUNK; t < end; t++) {
        const float *x = (const float *)row_of(step, op->source, t);
        float scale = op->weight ? 1.0f / sqrtf(mean_square(x, op->n) + op->epsilon) : 1.0f;
        const float *weight = op->weight;
        if (weight)
            for (int64_t i = 0; i < op->n; i++) y[i] = x[i] * scale * weight[i];
        else
            memcpy(y, x, (size_t)op->n * 4);
        if (op->epilogue == ADD) {
            float *sum = (float *)row_of(step, op->target, t);
            for (int64_t i = 0; i < op->n; i++) sum[i] += op->factor * y[i];
        } else {
            write_as(step, op, t, y);
        }
    }
}

/* The rows whose logits are wanted; n is in bytes. */
void gather_chunk(const Step *step, const Op *op, int64_t chunk) {
    for (int64_t t = chunk * TOKENS_PER_CHUNK; t < end_of(step, op, chunk); t++)
        memcpy(row_of(step, op->target, t), row_of(step, op->source, step->logits_index[t]), op->n);
}

/* Floats become integers of sixteen bits. */
void quantise_chunk(const Step *step, const Op *op, int64_t chunk) {
    int64_t end = end_of(step, op, chunk);
    for (int64_t t = chunk * TOKENS_PER_CHUNK; t < end; t++) write_as(step, op, t, (const float *)row_of(step, op->source, t));
}

static void normalise(float *x, const float *weight, int64_t n, float epsilon) {
    float scale = 1.0f / sqrtf(mean_square(x, n) + epsilon);
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * scale * weight[i];
}

static void turn(float *restrict low, float *restrict high, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = low[i], b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[i] + a * sine[i];
    }
}

/* Stores one token's key and value of one head. In pages that hold whole panels, keys are panels over the head's elements
 * and bfloat16 values are panels over the positions; elsewhere elements lie as in the token. */
static void write_cache(const Step *step, int layer, int64_t head, int64_t slot, const float *k, const float *v) {
    int64_t size = step->head_dim, block = slot / step->block_size, offset = slot % step->block_size;
    int64_t page = (block * step->num_kv_heads + head) * step->block_size * size, paneled = step->block_size % PANEL == 0;
    if (step->kv_kind == F32) {
        float *keys = (float *)step->key_pages[layer] + page, *values = (float *)step->value_pages[layer] + page;
        memcpy(values + offset * size, v, (size_t)size * 4);
        keys += paneled ? offset / PANEL * size * PANEL + offset % PANEL : offset * size;
        for (int64_t d = 0; d < size; d++) keys[d * (paneled ? PANEL : 1)] = k[d];
        return;
    }
    uint16_t *keys = (uint16_t *)step->key_pages[layer] + page, *values = (uint16_t *)step->value_pages[layer] + page;
    uint16_t half_k[MAX_HEAD_DIM], half_v[MAX_HEAD_DIM];
    for (int64_t d = 0; d < size; d += LANES)
        store_bf16(half_k + d, *(const vec *)(k + d)), store_bf16(half_v + d, *(const vec *)(v + d));
    if (!paneled) {
        memcpy(keys + offset * size, half_k, (size_t)size * 2);
        memcpy(values + offset * size, half_v, (size_t)size * 2);
        return;
    }
    keys += offset / PANEL * size * PANEL + offset % PANEL * 2;
    for (int64_t d = 0; d < size; d += 2) memcpy(keys + d * PANEL, half_k + d, 4);
    values += offset / 2 * PANEL * 2 + offset % 2;
    for (int64_t d = 0; d < size; d += PANEL, values += step->block_size * PANEL)
        for (int64_t i = 0; i < PANEL; i++) values[i * 2] = half_v[d + i];
}

/* Queries and keys are normed (where the family does) and turned; queries go to the target, keys and values to their pages. */
void rope_chunk(const Step *step, const Op *op, int64_t chunk) {
    int64_t end = end_of(step, op, chunk);
    int64_t size = step->head_dim, q_size = step->num_heads * size, kv_size = step->num_kv_heads * size;
    int64_t half = op->rope_dim / 2;
    for (int64_t t = chunk * TOKENS_PER_CHUNK; t < end; t++) {
        float *q = (float *)row_of(step, op->source, t);
        float *k = q + q_size, *v = k + kv_size;
        if (op->q_norm && step->full_norm) {
            normalise(q, op->q_norm, q_size, op->epsilon);
            normalise(k, op->k_norm, kv_size, op->epsilon);
        }
        for (int64_t h = 0; h < step->num_heads + step->num_kv_heads; h++) {
            float *x = q + h * size;
            if (op->q_norm && !step->full_norm) normalise(x, h < step->num_heads ? op->q_norm : op->k_norm, size, op->epsilon);
            if (half) turn(x, x + half, op->cosine + step->positions[t] * half, op->sine + step->positions[t] * half, half);
        }
        char *out = row_of(step, op->target, t);
        if (op->target_kind == BF16)
            for (int64_t i = 0; i < q_size; i += LANES) store_bf16((uint16_t *)out + i, *(const vec *)(q + i));
        else
            memcpy(out, q, q_size * 4);
        for (int64_t h = 0; h < step->num_kv_heads; h++)
            write_cache(step, op->layer, h, step->slot_mapping[t], k + h * size, v + h * size);
    }
}
