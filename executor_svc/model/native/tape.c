/* Runs a tape: every thread walks the same operations and takes pieces of each until none is left, so a thread that the
 * system has put aside delays nobody unless it holds a piece. Threads spin briefly at the end of an operation, then yield.
 */
#define _GNU_SOURCE
#include "engine.h"
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_OPS = 1 << 16, MAX_THREADS = 256, SPINS = 300 };

typedef struct {
    _Alignas(64) _Atomic int64_t next;
    _Atomic int64_t done;
} Progress;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    Step step; /* a copy: stragglers may look at it after the run */
    const Op *ops;
    int64_t num_ops, num_queries;
    Query *queries;
    int64_t room;
    Progress *progress;
    int64_t generation; /* under lock */
    _Atomic int inside; /* threads that may still look at the run */
    int open, num_threads;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void pause_thread(int *spins) {
    if (++*spins > SPINS) sched_yield();
#if defined(__x86_64__)
    else _mm_pause();
#endif
}

/* Of this thread: what others take from it on a busy machine does not count. */
static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t num_chunks(const Step *step, const Op *op) {
    switch (op->code) {
        case LINEAR: return linear_chunks(step, op);
        case ATTENTION: return pool.num_queries * step->num_kv_heads;
        default: return ceil_div(num_rows_of(step, op), TOKENS_PER_CHUNK);
    }
}

/* The longest, which come last, first. */
static void run_attention(const Step *step, const Op *op, int64_t chunk) {
    int64_t heads = step->num_kv_heads, index = pool.num_queries * heads - 1 - chunk, next = index - step->num_threads;
    attention_chunk(step, op, &pool.queries[index / heads], (int)(index % heads),
                    next >= 0 ? &pool.queries[next / heads] : NULL, (int)(next >= 0 ? next % heads : 0));
}

static void run_chunk(const Step *step, const Op *op, int64_t chunk) {
    switch (op->code) {
        case EMBED: embed_chunk(step, op, chunk); break;
        case NORM: norm_chunk(step, op, chunk); break;
        case LINEAR: linear_chunk(step, op, chunk); break;
        case ROPE: rope_chunk(step, op, chunk); break;
        case GATHER: gather_chunk(step, op, chunk); break;
        case QUANTISE: quantise_chunk(step, op, chunk); break;
        case ATTENTION: run_attention(step, op, chunk);
    }
}

static void walk(int64_t *nanoseconds) {
    begin_tiles();
    for (int64_t i = 0; i < pool.num_ops; i++) {
        const Op *op = &pool.ops[i];
        Progress *p = &pool.progress[i];
        int64_t begin = nanoseconds ? now() : 0, total = num_chunks(&pool.step, op), chunk;
        while ((chunk = atomic_fetch_add(&p->next, 1)) < total) {
            run_chunk(&pool.step, op, chunk);
            atomic_fetch_add(&p->done, 1);
        }
        for (int spins = 0; atomic_load(&p->done) < total;) pause_thread(&spins);
        if (nanoseconds) nanoseconds[op->code] += now() - begin;
    }
    end_tiles();
}

static void *work(void *number) {
    int64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.open || pool.generation == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = pool.generation;
        if ((intptr_t)number >= pool.step.num_threads) continue;
        atomic_fetch_add(&pool.inside, 1);
        pthread_mutex_unlock(&pool.lock);
        walk(NULL);
        atomic_fetch_sub(&pool.inside, 1);
        pthread_mutex_lock(&pool.lock);
    }
    return NULL;
}

/* Sees to it that `num_threads` threads can run tapes, the caller included. Returns whether AMX is used, or -1. */
int engine_start(int num_threads) {
    static int tiles = -1;
    if (tiles < 0) tiles = enable_tiles();
    if (!pool.num_threads) pool.num_threads = 1;
    while (pool.num_threads < num_threads && pool.num_threads < MAX_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)pool.num_threads)) return -1;
        pthread_detach(thread);
        pool.num_threads++;
    }
    return tiles;
}

/* The element type that matrices of bfloat16 and of bytes are multiplied by: BF16, or F32 and I16. */
int engine_pairs(void) { return PAIRED; }

/* No number of the step becomes an index before it is checked. Returns what is out of range, or null. */
static const char *check(const Step *s) {
    if (s->cu_seqlens[0] != 0 || s->cu_seqlens[s->num_rows] != s->num_tokens) return "cu_seqlens";
    for (int64_t t = 0; t < s->num_tokens; t++) {
        if (s->token_ids[t] < 0 || s->token_ids[t] >= s->vocab_size) return "token_ids";
        if (s->positions[t] < 0 || s->positions[t] >= s->max_position) return "positions";
        if (s->slot_mapping[t] < 0 || s->slot_mapping[t] >= s->num_blocks * s->block_size) return "slot_mapping";
    }
    for (int64_t r = 0; r < s->num_rows; r++) {
        int64_t count = s->cu_seqlens[r + 1] - s->cu_seqlens[r], blocks = ceil_div(s->seq_lens[r], s->block_size);
        if (count < 0 || s->seq_lens[r] < count || s->seq_lens[r] > s->max_position) return "seq_lens";
        if (blocks > s->table_stride) return "block_tables";
        for (int64_t i = 0; i < blocks; i++) {
            int32_t block = s->block_tables[r * s->table_stride + i];
            if (block < 0 || block >= s->num_blocks) return "block_tables";
        }
    }
    for (int64_t i = 0; i < s->num_logits; i++)
        if (s->logits_index[i] < 0 || s->logits_index[i] >= s->num_tokens) return "logits_index";
    return NULL;
}

/* How many positions of rows a and b lie in the same blocks from the first one on, in whole tiles. */
static int32_t shared_positions(const Step *s, int32_t a, int32_t b) {
    const int32_t *x = s->block_tables + a * s->table_stride, *y = s->block_tables + b * s->table_stride;
    int64_t shorter = s->seq_lens[a] < s->seq_lens[b] ? s->seq_lens[a] : s->seq_lens[b];
    int64_t most = (shorter - 1) / s->block_size, i = 0;
    while (i < most && x[i] == y[i]) i++;
    return (int32_t)(i * s->block_size / TILE * TILE);
}

/* Rows of one token each that begin with the same blocks, and lie side by side in the step, are attended together. */
static int32_t list_together(const Step *s, int32_t row, int32_t most) {
    int32_t count = 1, shared = 0;
    while (count < most && row + count < s->num_rows && s->cu_seqlens[row + count + 1] == s->cu_seqlens[row + count] + 1) {
        int32_t common = shared_positions(s, row, row + count);
        if (common == 0 || (shared && common < shared)) break;
        if (!shared) shared = common;
        count++;
    }
    pool.queries[pool.num_queries++] = (Query){row, s->cu_seqlens[row], count, s->seq_lens[row] - 1, shared};
    return count;
}

/* Cuts every row's tokens into attention chunks. */
static int list_queries(const Step *s) {
    int64_t size = queries_per_chunk(s), most = s->num_rows + s->num_tokens;
    if (most > pool.room) {
        free(pool.queries);
        pool.queries = malloc((size_t)most * sizeof(Query));
        pool.room = pool.queries ? most : 0;
        if (!pool.queries) return 0;
    }
    pool.num_queries = 0;
    for (int32_t r = 0; r < s->num_rows; r++) {
        if (s->cu_seqlens[r + 1] == s->cu_seqlens[r] + 1) {
            r += list_together(s, r, (int32_t)size) - 1;
            continue;
        }
        for (int32_t t = s->cu_seqlens[r]; t < s->cu_seqlens[r + 1]; t += (int32_t)size) {
            int32_t left = s->cu_seqlens[r + 1] - t, count = left < size ? left : (int32_t)size;
            pool.queries[pool.num_queries++] = (Query){r, t, count, s->seq_lens[r] - left, 0};
        }
    }
    return 1;
}

/* Runs the tape over the step. Returns null, or the name of the batch field that is out of range. */
const char *engine_run(const Step *step, const Op *ops, int64_t num_ops) {
    const char *wrong = check(step);
    if (wrong) return wrong;
    for (int spins = 0; atomic_load(&pool.inside);) pause_thread(&spins); /* stragglers of the last run */
    if (!pool.progress) pool.progress = aligned_alloc(64, MAX_OPS * sizeof(Progress));
    if (!pool.progress || num_ops > MAX_OPS || !list_queries(step)) return "memory";
    memset(pool.progress, 0, (size_t)num_ops * sizeof(Progress));
    pthread_mutex_lock(&pool.lock);
    pool.step = *step, pool.ops = ops, pool.num_ops = num_ops;
    pool.generation++, pool.open = 1;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    walk(step->nanoseconds);
    pthread_mutex_lock(&pool.lock);
    pool.open = 0; /* a helper that has not come yet need not come */
    pthread_mutex_unlock(&pool.lock);
    return NULL;
}
