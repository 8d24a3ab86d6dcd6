/* Causal attention over block tables, reading pages in place: softmax(q k^T) v with a running maximum over tiles of 128
 * positions. Tiles and groups begin at absolute multiples of their size, and a masked position adds exactly nothing, so a
 * query's result does not depend on what is computed beside it.
 *
 * The rows of a chunk are its tokens times the query heads that share a key head. What lies in a page beyond the sequence is
 * never multiplied: scores there are replaced, and the last group of values is copied with its tail cleared.
 */
#include "engine.h"

typedef struct {
    const Step *step;
    int layer, head, kind;
    const int32_t *table;
    int64_t length;  /* positions that exist */
    int per;         /* elements in a word of a page */
    int segment;     /* positions per segment of values */
    char *copies;    /* room for cleaned or rearranged groups */
} Pages;

int64_t queries_per_chunk(const Step *step) {
    int64_t group = step->num_heads / step->num_kv_heads;
    return group >= ROWS ? 1 : ROWS / group;
}

static const char *page(const Pages *p, void *const *pages, int64_t position) {
    const Step *s = p->step;
    int64_t block = p->table[position / s->block_size], element = p->kind == BF16 ? 2 : 4;
    return (const char *)pages[p->layer] + (block * s->num_kv_heads + p->head) * s->block_size * s->head_dim * element;
}

static inline void copy_element(int kind, char *to, int64_t i, const char *from, int64_t j) {
    if (kind == BF16) ((uint16_t *)to)[i] = ((const uint16_t *)from)[j];
    else ((float *)to)[i] = ((const float *)from)[j];
}

/* The panel of keys for 16 positions. */
static const uint32_t *key_panel(const Pages *p, int64_t position, char *room) {
    const Step *s = p->step;
    int64_t size = s->head_dim, per = p->per;
    if (s->block_size % PANEL == 0) {
        int64_t offset = position % s->block_size;
        if (position >= p->length) position = 0, offset = 0; /* masked later: any readable panel does */
        return (const uint32_t *)page(p, s->key_pages, position) + offset / PANEL * (size / per) * PANEL;
    }
    for (int64_t i = 0; i < PANEL; i++) {
        int64_t at = position + i < p->length ? position + i : 0;
        const char *keys = page(p, s->key_pages, at);
        for (int64_t d = 0; d < size; d++)
            copy_element(p->kind, room, (d / per * PANEL + i) * per + d % per, keys, at % s->block_size * size + d);
    }
    return (const uint32_t *)room;
}

/* Copies a segment of values into panels, zero beyond the sequence. */
static void copy_values(const Pages *p, int64_t position, char *room) {
    const Step *s = p->step;
    int64_t size = s->head_dim, paged = s->block_size % PANEL == 0;
    memset(room, 0, (size_t)(p->segment * size * (p->kind == BF16 ? 2 : 4)));
    for (int64_t i = 0; i < p->segment && position + i < p->length; i++) {
        int64_t offset = (position + i) % s->block_size;
        const char *values = page(p, s->value_pages, position + i);
        if (p->kind == F32) {
            memcpy(room + i * size * 4, values + offset * size * 4, size * 4);
            continue;
        }
        for (int64_t d = 0; d < size; d++) {
            int64_t to = (d / PANEL * (p->segment / 2) + i / 2) * PANEL * 2 + d % PANEL * 2 + i % 2;
            int64_t from = paged ? (d / PANEL * (s->block_size / 2) + offset / 2) * PANEL * 2 + d % PANEL * 2 + offset % 2
                                 : offset * size + d;
            ((uint16_t *)room)[to] = ((const uint16_t *)values)[from];
        }
    }
}

/* A segment of bfloat16 values from two halves, each whole within a page, side by side. */
static void join_halves(const Pages *p, int64_t position, char *room) {
    const Step *s = p->step;
    for (int half = 0; half < 2; half++) {
        const char *values = page(p, s->value_pages, position + half * PANEL);
        int64_t offset = (position + half * PANEL) % s->block_size;
        for (int64_t d = 0; d < s->head_dim / PANEL; d++) {
            const char *from = values + (d * (s->block_size / 2) + offset / 2) * PANEL * 4;
            memcpy(room + (d * 16 + half * 8) * PANEL * 4, from, 8 * PANEL * 4);
        }
    }
}

/* The first panel of a segment of values; the next ones follow *panel_words apart. */
static const uint32_t *value_segment(const Pages *p, int64_t position, char *room, int *panel_words) {
    const Step *s = p->step;
    int64_t offset = position % s->block_size;
    int whole = position + p->segment <= p->length;
    if (p->kind == F32) {
        *panel_words = PANEL;
        if (whole && offset + p->segment <= s->block_size)
            return (const uint32_t *)page(p, s->value_pages, position) + offset * s->head_dim;
        copy_values(p, position, room);
        return (const uint32_t *)room;
    }
    if (whole && s->block_size % p->segment == 0) {
        *panel_words = (int)(s->block_size / 2) * PANEL;
        return (const uint32_t *)page(p, s->value_pages, position) + offset / 2 * PANEL;
    }
    *panel_words = p->segment / 2 * PANEL;
    if (whole && s->block_size % PANEL == 0) join_halves(p, position, room);
    else copy_values(p, position, room);
    return (const uint32_t *)room;
}

/* What to fetch while the keys (values) of a tile are read: those of another sequence at the same place, if it has them. */
static const uint32_t *key_ahead(const Pages *next, int64_t position, const uint32_t *otherwise) {
    return next && position < next->length ? key_panel(next, position, 0) : otherwise;
}
static const uint32_t *value_ahead(const Pages *next, int64_t position, int64_t panel, const uint32_t *otherwise) {
    if (!next || position >= next->length) return otherwise;
    const Step *s = next->step;
    int64_t offset = position % s->block_size, half = s->head_dim / PAIR;
    if (next->kind == F32) return (const uint32_t *)page(next, s->value_pages, position) + offset * s->head_dim + panel * PANEL;
    if (s->block_size % next->segment == 0)
        return (const uint32_t *)page(next, s->value_pages, position) + (panel * (s->block_size / 2) + offset / 2) * PANEL;
    if (panel >= half && position + PANEL < next->length) position += PANEL, panel -= half; /* halves lie in pages of their own */
    return (const uint32_t *)page(next, s->value_pages, position) + position % s->block_size / 2 * PANEL + panel * GROUP / 2 * PANEL;
}

/* Scores of one row over a tile become weights; returns the factor by which what was summed before must shrink. */
static float soften(float *score, int64_t begin, int64_t end, int64_t first, int64_t last, const Op *op, float *maximum,
                    float *total) {
    vec largest = splat(-INFINITY);
    veci lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int64_t at = begin; at < end; at += LANES) {
        vec *s = (vec *)(score + (at - begin));
        vec x = *s * op->factor;
        if (op->softcap > 0) x = vtanh(x / op->softcap) * op->softcap;
        veci position = lane + (int32_t)at;
        x = choose((position >= (int32_t)first) & (position <= (int32_t)last), x, splat(-INFINITY));
        largest = vmax(largest, x);
        *s = x;
    }
    float before = *maximum, now = max_lanes(largest);
    now = now > before ? now : before;
    if (now == -INFINITY) {
        memset(score, 0, (size_t)(end - begin) * 4);
        return 1.0f;
    }
    vec sum = {0};
    for (int64_t at = begin; at < end; at += LANES) {
        vec *s = (vec *)(score + (at - begin));
        *s = vexp(*s - now);
        sum += *s;
    }
    float shrink = before == -INFINITY ? 0.0f : vexp(splat(before - now))[0];
    *total = *total * shrink + sum_lanes(sum);
    *maximum = now;
    return shrink;
}

static void gather_queries(const Step *step, const Op *op, const Query *query, int head, char *to, int bytes) {
    int64_t group = step->num_heads / step->num_kv_heads;
    for (int64_t i = 0; i < query->count * group; i++) {
        int64_t token = query->first + i / group, q_head = head * group + i % group;
        const char *from = row_of(step, op->source, token);
        memcpy(to + i * bytes, from + q_head * bytes, (size_t)bytes);
    }
}

static void write_result(const Step *step, const Op *op, const Query *query, int head, const float *sums, const float *totals) {
    int64_t group = step->num_heads / step->num_kv_heads, size = step->head_dim;
    for (int64_t i = 0; i < query->count * group; i++) {
        int64_t token = query->first + i / group, q_head = head * group + i % group;
        char *out = row_of(step, op->target, token);
        float inverse = 1.0f / totals[i];
        for (int64_t d = 0; d < size; d += LANES) {
            vec y = *(const vec *)(sums + i * size + d) * inverse;
            if (op->target_kind == BF16) store_bf16((uint16_t *)out + q_head * size + d, y);
            else *(vec *)((float *)out + q_head * size + d) = y;
        }
    }
}

/* sums += weights x values over one tile. */
static void add_values(const Pages *p, const Pages *after, int rows, const char *weights, int64_t begin, int64_t end, float *sums) {
    const Step *s = p->step;
    int segments = (int)ceil_div(end - begin, p->segment), strides[TILE / PANEL];
    const uint32_t *base[TILE / PANEL], *b[TILE / PANEL * 4], *ahead[TILE / PANEL * 4];
    for (int i = 0; i < segments; i++) {
        char *room = p->copies + i * p->segment * s->head_dim * (p->kind == BF16 ? 2 : 4);
        base[i] = value_segment(p, begin + i * p->segment, room, &strides[i]);
    }
    for (int64_t d = 0; d < s->head_dim; d += 4 * PANEL) {
        int panels = s->head_dim - d < 4 * PANEL ? (int)((s->head_dim - d) / PANEL) : 4;
        for (int i = 0; i < segments; i++)
            for (int j = 0; j < panels; j++) {
                b[i * panels + j] = base[i] + (d / PANEL + j) * strides[i];
                ahead[i * panels + j] = value_ahead(after, begin + i * p->segment, d / PANEL + j, base[i]);
            }
        multiply(p->kind, (const uint32_t *)weights, p->kind == BF16 && PAIRED ? TILE / 2 : TILE, rows, b, panels, segments, p->segment / p->per,
                 p->kind == F32 ? (int)s->head_dim : PANEL, sums + d, (int)s->head_dim, 1, after ? ahead : 0);
    }
}

/* What a chunk works with. `sums` and `totals` are those of the weighted values and of the weights, under `maxima`. */
typedef struct {
    char queries[ROWS * MAX_HEAD_DIM * 4] __attribute__((aligned(64)));
    char copies[TILE * MAX_HEAD_DIM * 4] __attribute__((aligned(64)));
    float sums[ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[ROWS * TILE] __attribute__((aligned(64)));
    uint16_t halves[ROWS * TILE] __attribute__((aligned(64)));
    float maxima[ROWS], totals[ROWS];
} Room;

static int rows_of(const Step *step, const Query *query) { return (int)(query->count * (step->num_heads / step->num_kv_heads)); }

static Pages pages_of(const Step *step, const Op *op, const Query *query, int head, char *copies) {
    int kind = (int)step->kv_kind;
    return (Pages){step, op->layer, head, kind, step->block_tables + query->row * step->table_stride,
                   query->position + (query->shared ? 1 : query->count), kind == BF16 ? 2 : 1,
                   kind == BF16 && (PAIRED || step->block_size % PANEL) ? GROUP : PANEL, copies};
}

/* The tiles from position `from` to `to`, each a whole one but perhaps the first and the last. */
static void attend(const Step *step, const Op *op, const Query *query, const Pages *pages, const Pages *after, Room *room,
                   int64_t from, int64_t to) {
    int kind = (int)step->kv_kind, half = kind == BF16 && PAIRED, rows = rows_of(step, query);
    int64_t group = step->num_heads / step->num_kv_heads, size = step->head_dim, unit = pages->segment;
    for (int64_t tile = from / TILE * TILE; tile < to; tile += TILE) {
        int64_t begin = tile > from / unit * unit ? tile : from / unit * unit;
        int64_t end = tile + TILE < to ? tile + TILE : ceil_div(to, unit) * unit;
        for (int64_t at = begin; at < end; at += COLUMNS) {
            const uint32_t *b[4], *ahead[4];
            int panels = end - at < COLUMNS ? (int)((end - at) / PANEL) : 4;
            for (int j = 0; j < panels; j++) {
                b[j] = key_panel(pages, at + j * PANEL, room->copies + j * PANEL * size * 4);
                ahead[j] = key_ahead(after, at + j * PANEL, b[j]);
            }
            multiply(kind, (const uint32_t *)room->queries, (int)size / (half ? 2 : 1), rows, b, panels, 1,
                     (int)size / pages->per, PANEL, room->scores + (at - begin), TILE, 0, after ? ahead : 0);
        }
        for (int i = 0; i < rows; i++) {
            float *scores = room->scores + i * TILE, *sums = room->sums + i * size;
            int64_t last = query->position + i / group, first = op->window && last >= op->window ? last - op->window + 1 : 0;
            float shrink = soften(scores, begin, end, first, last, op, &room->maxima[i], &room->totals[i]);
            if (shrink != 1.0f)
                for (int64_t d = 0; d < size; d += LANES) *(vec *)(sums + d) *= shrink;
            if (half)
                for (int64_t j = 0; j < end - begin; j += LANES) store_bf16(room->halves + i * TILE + j, *(vec *)(scores + j));
        }
        add_values(pages, after, rows, half ? (char *)room->halves : (char *)room->scores, begin, end, room->sums);
    }
}

static void begin_rows(const Step *step, const Op *op, const Query *query, int head, Room *room) {
    int rows = rows_of(step, query), half = step->kv_kind == BF16 && PAIRED;
    gather_queries(step, op, query, head, room->queries, (int)step->head_dim * (half ? 2 : 4));
    memset(room->sums, 0, (size_t)((rows > 16 ? ROWS : 16) * step->head_dim * 4));
    for (int i = 0; i < rows; i++) room->maxima[i] = -INFINITY, room->totals[i] = 0;
}

/* From `from` on, or from where the window begins. */
static void attend_row(const Step *step, const Op *op, const Query *query, int head, const Query *next, int next_head, Room *room,
                       int64_t from) {
    Pages pages = pages_of(step, op, query, head, room->copies), other, *after = 0;
    /* Of few queries, reading the pages is what takes the time. */
    if (next && rows_of(step, query) <= PANEL && step->block_size % PANEL == 0) {
        other = pages_of(step, op, next, next_head, room->copies);
        after = &other;
    }
    int64_t lowest = op->window && query->position >= op->window ? query->position - op->window + 1 : 0;
    attend(step, op, query, &pages, after, room, from > lowest ? from : lowest, pages.length);
    write_result(step, op, query, head, room->sums, room->totals);
}

static Query member_of(const Step *step, const Query *query, int32_t i) {
    return (Query){query->row + i, query->first + i, 1, step->seq_lens[query->row + i] - 1, 0};
}

/* The tiles in common for all rows at once, then each row's own with what it has from there: sums in the same order as
 * alone. */
static void attend_together(const Step *step, const Op *op, const Query *query, int head, Room *room) {
    int64_t group = step->num_heads / step->num_kv_heads, size = step->head_dim;
    Room own;
    int64_t common = op->window ? 0 : query->shared; /* windows begin at each row's own place */
    Query all = *query;
    all.position = query->shared; /* beyond every position in common: none is masked */
    Pages pages = pages_of(step, op, query, head, room->copies);
    begin_rows(step, op, &all, head, room);
    attend(step, op, &all, &pages, 0, room, 0, common);
    for (int32_t i = 0; i < query->count; i++) {
        Query one = member_of(step, query, i);
        begin_rows(step, op, &one, head, &own);
        memcpy(own.sums, room->sums + i * group * size, (size_t)(group * size) * 4);
        memcpy(own.maxima, room->maxima + i * group, (size_t)group * 4);
        memcpy(own.totals, room->totals + i * group, (size_t)group * 4);
        Query then = member_of(step, query, i + 1 < query->count ? i + 1 : i);
        attend_row(step, op, &one, head, &then, head, &own, common);
    }
}

void attention_chunk(const Step *step, const Op *op, const Query *query, int head, const Query *next, int next_head) {
    Room room;
    if (query->shared) {
        attend_together(step, op, query, head, &room);
        return;
    }
    begin_rows(step, op, query, head, &room);
    attend_row(step, op, query, head, next, next_head, &room, 0);
}
