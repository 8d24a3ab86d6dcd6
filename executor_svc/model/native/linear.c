/* Linear layers: y = x * weight + bias, then stored, added to the residual, or gated. */
#include "engine.h"

enum {
    ROWS_PER_CHUNK = 256,
    VECTOR_ROWS = 96,   /* of a block without tiles: its results stay in the nearest cache */
    LEAD = 64,          /* rows of a pair of panels that are asked for in advance: 2 kB */
    EXPANDED_WORDS = 128 /* words of bytes that become bfloat16 at a time: 512 inputs */
};

/* So many that reading them is one stream, so few that the threads end together. */
static int panels_per_chunk(const Step *step, const Op *op) {
    if (op->n >= 2048) return 8;
    if (!PAIRED && num_rows_of(step, op) > 3) return 2;
    return op->epilogue == GLU || op->n >= 512 ? 4 : 2;
}

int64_t linear_chunks(const Step *step, const Op *op) {
    return ceil_div(ceil_div(op->n, PANEL), panels_per_chunk(step, op)) * ceil_div(num_rows_of(step, op), ROWS_PER_CHUNK);
}

static vec activate(int activation, vec x) {
    if (activation == SILU) return x / (1.0f + vexp(-x));
    return 0.5f * x * (1.0f + vtanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

/* Results of one row as floats: bytes are rescaled, the bias is added. */
static inline vec finish(const Op *op, const float *c, int64_t column, float row_scale) {
    vec y = *(const vec *)c;
    if (op->kind == INT8) {
        if (!PAIRED) y = __builtin_convertvector((veci)y, vec) * row_scale;
        y *= *(const vec *)((const float *)op->scale + column);
    }
    if (op->bias) y += *(const vec *)((const float *)op->bias + column);
    return y;
}

static void write_row(const Step *step, const Op *op, const float *c, int64_t row, int64_t first_panel, int panels) {
    float row_scale = op->kind == INT8 && !PAIRED ? ((const float *)step->buffers[op->row_scale].data)[row] : 1.0f;
    char *out = row_of(step, op->target, row);
    if (op->epilogue == GLU) { /* panels alternate: gate, up */
        for (int i = 0; i < panels * PANEL; i += i % PANEL + LANES == PANEL ? PANEL + LANES : LANES) {
            int64_t column = first_panel * PANEL + i, to = (column / PAIR) * PANEL + column % PANEL;
            vec y = activate(op->activation, finish(op, c + i, column, row_scale)) *
                    finish(op, c + i + PANEL, column + PANEL, row_scale);
            if (op->target_kind == BF16) store_bf16((uint16_t *)out + to, y);
            else *(vec *)((float *)out + to) = y;
        }
        return;
    }
    for (int i = 0; i < panels * PANEL; i += LANES) {
        int64_t column = first_panel * PANEL + i;
        vec y = finish(op, c + i, column, row_scale) * op->factor;
        float *to = (float *)out + column;
        if (op->softcap > 0) y = vtanh(y / op->softcap) * op->softcap;
        if (column + LANES <= op->n) {
            if (op->epilogue == ADD) y += *(vec *)to;
            *(vec *)to = y;
        } else {
            for (int l = 0; column + l < op->n; l++) to[l] = op->epilogue == ADD ? to[l] + y[l] : y[l];
        }
    }
}

/* Four bytes to two pairs of bfloat16, which hold them exactly. */
static void expand(const uint32_t *from, int words, uint32_t *to) {
    for (int w = 0; w < words; w++, from += PAIR, to += 2 * PAIR)
        for (int i = 0; i < PAIR; i += LANES) {
            vecu bytes = *(const vecu *)(from + i);
            vecu x[4];
            for (int j = 0; j < 4; j++) x[j] = (vecu)__builtin_convertvector((veci)(bytes << (24 - 8 * j)) >> 24, vec);
            *(vecu *)(to + i) = (x[0] >> 16) | x[1];
            *(vecu *)(to + PAIR + i) = (x[2] >> 16) | x[3];
        }
}

/* Weights in bytes, activations in bfloat16: a piece of the panels is expanded, then all rows of the chunk use it. */
static void expanded_panels(const Step *step, const Op *op, int64_t panel, int panels, int64_t first_row, int64_t end_row) {
    uint32_t room[2 * 2 * EXPANDED_WORDS * PAIR] __attribute__((aligned(64)));
    float c[ROWS_PER_CHUNK * COLUMNS] __attribute__((aligned(64)));
    const Buffer *source = &step->buffers[op->source];
    int words = words_per(INT8, op->k), lda = (int)(source->stride / 4);
    for (int w = 0; w < words; w += EXPANDED_WORDS) {
        int count = words - w < EXPANDED_WORDS ? words - w : EXPANDED_WORDS;
        const uint32_t *b[4];
        for (int j = 0; j < panels; j++) {
            uint32_t *to = room + j / 2 * 2 * EXPANDED_WORDS * PAIR;
            if (j % 2 == 0) expand((const uint32_t *)op->weight + ((panel + j) / 2 * words + w) * PAIR, count, to);
            b[j] = to + j % 2 * PANEL;
        }
        for (int64_t row = first_row; row < end_row; row += ROWS) {
            int rows = end_row - row < ROWS ? (int)(end_row - row) : ROWS;
            const uint32_t *a = (const uint32_t *)((const char *)source->data + row * source->stride) + 2 * w;
            multiply(BF16, a, lda, rows, b, panels, 1, 2 * count, PAIR, c + (row - first_row) * COLUMNS, COLUMNS, w > 0, 0);
        }
    }
    for (int64_t row = first_row; row < end_row; row++) write_row(step, op, c + (row - first_row) * COLUMNS, row, panel, panels);
}

static void plain_panels(const Step *step, const Op *op, int64_t panel, int panels, int64_t first_row, int64_t end_row) {
    float c[VECTOR_ROWS * COLUMNS] __attribute__((aligned(64)));
    const Buffer *source = &step->buffers[op->source];
    int words = words_per(op->kind, op->k), lda = (int)(source->stride / 4), most = tiles_enabled() ? ROWS : VECTOR_ROWS;
    const uint32_t *b[4], *ahead[4];
    for (int j = 0; j < panels; j++) {
        b[j] = (const uint32_t *)op->weight + (panel + j) / 2 * words * PAIR + (panel + j) % 2 * PANEL;
        ahead[j] = b[j] + LEAD * PAIR;
    }
    for (int64_t row = first_row; row < end_row; row += most) {
        int count = end_row - row < most ? (int)(end_row - row) : most;
        const uint32_t *a = (const uint32_t *)((const char *)source->data + row * source->stride);
        multiply(op->kind, a, lda, count, b, panels, 1, words, PAIR, c, COLUMNS, 0, row == first_row ? ahead : 0);
        for (int i = 0; i < count; i++) write_row(step, op, c + i * COLUMNS, row + i, panel, panels);
    }
}

void linear_chunk(const Step *step, const Op *op, int64_t chunk) {
    int64_t num_panels = ceil_div(op->n, PANEL), wide = panels_per_chunk(step, op), across = ceil_div(num_panels, wide);
    int64_t first_panel = chunk % across * wide, end_panel = first_panel + wide < num_panels ? first_panel + wide : num_panels;
    int64_t first_row = chunk / across * ROWS_PER_CHUNK, rows = num_rows_of(step, op);
    int64_t end_row = first_row + ROWS_PER_CHUNK < rows ? first_row + ROWS_PER_CHUNK : rows;
    for (int64_t panel = first_panel; panel < end_panel; panel += 4) {
        int panels = end_panel - panel < 4 ? (int)(end_panel - panel) : 4;
        (op->kind == INT8 && PAIRED ? expanded_panels : plain_panels)(step, op, panel, panels, first_row, end_row);
    }
}
