/* Causal attention on a CPU with AVX512-BF16, forward and backward, in tiles that stay in the caches.

torch's fused kernel multiplies at a third of this rate, and computes most of what the mask hides. As in FlashAttention-2
(arXiv:2307.08691) no weights are kept: the backward computes them again from the logarithm of each query's sum. One
thread computes a key head with all its query heads, so no bit depends on the number of threads.

Called and compiled by attention.py. The instruction vdpbf16ps adds the products of two neighbouring numbers, so both sides of
a product lie in pairs, a pair in a uint32. Shapes as in model.py; `wide` is D and Tp is T, padded with zeros. */

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16 /* numbers in a register */
#define TILE 4   /* rows of a product whose sums are in registers at once */
#define PANEL 64 /* and columns */
#define BLOCK 64 /* queries that the backward adds to the gradients of keys and values at once */
#define INLINE static inline __attribute__((always_inline))
#define UP(x, to) (((x) + (to)-1) / (to) * (to))

typedef uint16_t num;
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct { /* (B, heads, T, D), and how many numbers apart rows, heads and positions are */
    num *data;
    long row, head, position;
} Tensor;

typedef struct {
    Tensor q, k, v, y, dy, dq, dk, dv; /* the forward needs no gradients, the backward no y */
    float *lse;                        /* (B, H, T): log of the sum of exponentials of a query's scores */
    const int64_t *firsts;             /* (B, T): the first key that each query sees */
    long B, H, K, T, D;
    float scale;
} Attention;

INLINE num *row_of(const Tensor *x, long b, long h, long t) {
    return x->data + b * x->row + h * x->head + t * x->position;
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

INLINE vec larger(vec x, vec y) { return (vec)_mm512_max_ps((__m512)x, (__m512)y); } /* y where one is NaN */
INLINE vec smaller(vec x, vec y) { return (vec)_mm512_min_ps((__m512)x, (__m512)y); }
INLINE vec where(__mmask16 mask, vec x, float otherwise) {
    return (vec)_mm512_mask_blend_ps(mask, _mm512_set1_ps(otherwise), (__m512)x);
}

INLINE vec exponential(vec x) { /* within 2e-7, for x from -87 to 88 */
    x = smaller((vec){0} + 88, larger((vec){0} - 87, x));
    vec n = x * 1.44269504f + 12582912.f - 12582912.f; /* the nearest integer */
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

INLINE __m256i rounded(vec x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }

/* to (D) = x (wide) * scale. */
INLINE void store_row(num *to, const float *x, float scale, long D) {
    for (long d = 0; d < D; d += LANES) {
        __mmask16 some = D - d < LANES ? (1 << (D - d)) - 1 : 0xffff;
        _mm256_mask_storeu_epi16(to + d, some, rounded(*(vec *)(x + d) * scale));
    }
}

/* Pairs of a number of x and one of y. */
INLINE ints paired(vec x, vec y) {
    __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded(y)), 16);
    return (ints)_mm512_or_si512(_mm512_cvtepu16_epi32(rounded(x)), high);
}

/* ---- layouts ----------------------------------------------------------------------------------------------------- */

/* n rows from position t -> (pad, D / 2) pairs of features. */
static void rows(const Tensor *x, long b, long h, long t, long n, long D, long pad, uint32_t *to) {
    for (long i = 0; i < n; i++) {
        const num *row = row_of(x, b, h, t + i);
        for (long d = 0; d < D; d += 8, to += 4) _mm_storeu_si128((__m128i *)to, _mm_loadu_si128((__m128i *)(row + d)));
    }
    memset(to, 0, (pad - n) * D * sizeof(num));
}

/* n rows from position t -> (pad / 2, wide) pairs of positions. */
static void pairs(const Tensor *x, long b, long h, long t, long n, long D, long pad, long wide, uint32_t *to) {
    memset(to, 0, pad / 2 * wide * sizeof(uint32_t));
    for (long i = 0; i < n; i++) {
        const num *row = row_of(x, b, h, t + i);
        for (long d = 0; d < D; d++) to[i / 2 * wide + d] |= (uint32_t)row[d] << i % 2 * 16;
    }
}

/* All T rows -> panels (T / PANEL, D / 2, PANEL) of pairs of features. */
static void panels(const Tensor *x, long b, long h, long T, long D, uint32_t *to) {
    for (long t = 0; t < UP(T, PANEL); t += 4) {
        static const num none[8];
        const num *row[4];
        long step[4];
        uint32_t *panel = to + t / PANEL * PANEL * (D / 2) + t % PANEL;
        for (long l = 0; l < 4; l++) row[l] = t + l < T ? row_of(x, b, h, t + l) : none, step[l] = t + l < T ? 2 : 0;
        for (long d = 0; d < D / 2; d += 4) {
            __m128 part[4];
#pragma GCC unroll 4
            for (long l = 0; l < 4; l++) part[l] = _mm_loadu_ps((float *)(row[l] + step[l] * d));
            _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
#pragma GCC unroll 4
            for (long l = 0; l < 4; l++) _mm_storeu_ps((float *)(panel + (d + l) * PANEL), part[l]);
        }
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* c (TILE, VECS registers) = or += a (TILE, n pairs) times b (n pairs, the columns). */
INLINE void tile(const uint32_t *a, long a_row, long a_pair, const uint32_t *b, long b_pair, long n, float *c,
                 long c_row, int add, const int VECS) {
    vec sums[TILE][4];
#pragma GCC unroll 4
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[r][v] = add ? *(vec *)(c + r * c_row + v * LANES) : (vec){0};
    for (long k = 0; k < n; k++, a += a_pair, b += b_pair) {
        __m512i columns[4];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) columns[v] = _mm512_loadu_si512(b + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) {
            __m512i pair = _mm512_set1_epi32(a[r * a_row]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++)
                sums[r][v] = (vec)_mm512_dpbf16_ps((__m512)sums[r][v], (__m512bh)pair, (__m512bh)columns[v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) *(vec *)(c + r * c_row + v * LANES) = sums[r][v];
}

/* The same for any multiple of LANES columns; panels of b are b_panel apart. */
static void product(const uint32_t *a, long a_row, long a_pair, const uint32_t *b, long b_pair, long b_panel, long n,
                    float *c, long c_row, long columns, int add) {
    for (; columns > 0; columns -= PANEL, b += b_panel, c += PANEL) switch (columns / LANES) {
        case 1: tile(a, a_row, a_pair, b, b_pair, n, c, c_row, add, 1); break;
        case 2: tile(a, a_row, a_pair, b, b_pair, n, c, c_row, add, 2); break;
        case 3: tile(a, a_row, a_pair, b, b_pair, n, c, c_row, add, 3); break;
        default: tile(a, a_row, a_pair, b, b_pair, n, c, c_row, add, 4);
        }
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Prefetch TILE rows, from position t, of what the next query head reads (dy may be NULL). Their stride, a row of all
heads, is too long for the hardware's prefetcher. Inline, or the compiler would drop it as a function without effect. */
INLINE void prefetch_next(const Attention *x, long b, long h, long t, const Tensor *dy) {
    const long G = x->H / x->K, next = (h + 1) % x->H, end = t + TILE < x->T ? t + TILE : x->T;
    const Tensor *all[] = {&x->q, dy, next % G ? NULL : &x->k, next % G ? NULL : &x->v};
    b += next == 0;
    for (int i = 0; i < 4; i++)
        for (long r = t; all[i] && r < end; r++)
            for (long d = 0, head = i < 2 ? next : next / G; d < x->D; d += 32)
                __builtin_prefetch(row_of(all[i], b, head, r) + d, 0, 2);
}

/* Which keys are visible to TILE queries, from i on. */
typedef struct {
    long n, low, high;           /* queries in the row; keys of any of them, low to high, low at a panel */
    long first[TILE], end[TILE]; /* keys of each query; none for one behind the row's end */
} KeyRange;

INLINE KeyRange key_range(const Attention *x, long b, long i) {
    KeyRange s = {.n = x->T - i < TILE ? x->T - i : TILE, .low = x->T};
    for (long r = 0; r < s.n; r++) {
        s.first[r] = x->firsts[b * x->T + i + r], s.end[r] = i + r + 1;
        s.low = s.first[r] < s.low ? s.first[r] : s.low;
    }
    s.low = s.low / PANEL * PANEL, s.high = UP(i + s.n, LANES);
    return s;
}

/* Which of the keys from j to j + LANES query r sees. */
INLINE __mmask16 seen(const KeyRange *s, long r, long j) {
    long skip = s->first[r] - j, n = s->end[r] - j;
    if (skip >= LANES || n <= 0) return 0;
    return (n < LANES ? (1 << n) - 1 : 0xffff) & (skip > 0 ? ~((1 << skip) - 1) : 0xffff);
}

static void forward_head(const Attention *x, long b, long h, const uint32_t *keys, const uint32_t *values, char *work) {
    const long T = x->T, D = x->D, wide = UP(D, LANES), Tp = UP(T, PANEL);
    uint32_t *q = (uint32_t *)work;
    float *scores = (float *)(q + TILE * D / 2), *sums = scores + TILE * Tp;
    num *weights = (num *)(sums + TILE * wide);
    for (long i = 0; i < T; i += TILE) {
        const KeyRange range = key_range(x, b, i);
        const long low = range.low, high = range.high, F = D / 2;
        float scale[TILE];
        prefetch_next(x, b, h, i, NULL);
        rows(&x->q, b, h, i, range.n, D, TILE, q);
        product(q, F, 1, keys + low * F, PANEL, PANEL * F, F, scores + low, Tp, high - low, 0);
        for (long r = 0; r < TILE; r++) {
            vec most = (vec){0} - INFINITY, total = {0};
            for (long j = low; j < high; j += LANES)
                most = larger(most, where(seen(&range, r, j), *(vec *)(scores + r * Tp + j), -INFINITY));
            float peak = _mm512_reduce_max_ps((__m512)most);
            for (long j = low; j < high; j += LANES) {
                vec e = exponential((*(vec *)(scores + r * Tp + j) - peak) * x->scale);
                e = where(seen(&range, r, j), e, 0);
                total += e;
                _mm256_storeu_si256((__m256i *)(weights + r * Tp + j), rounded(e));
            }
            float sum = _mm512_reduce_add_ps((__m512)total);
            scale[r] = 1 / sum;
            if (r < range.n) x->lse[(b * x->H + h) * T + i + r] = peak * x->scale + logf(sum);
        }
        const uint32_t *pairs = (uint32_t *)(weights + low);
        product(pairs, Tp / 2, 1, values + low / 2 * wide, wide, PANEL, (high - low) / 2, sums, wide, wide, 0);
        for (long r = 0; r < range.n; r++) store_row(row_of(&x->y, b, h, i + r), sums + r * wide, scale[r], D);
    }
}

void attention(const Attention *x, int n_threads) {
    const long T = x->T, D = x->D, wide = UP(D, LANES), Tp = UP(T, PANEL), G = x->H / x->K;
    const long size = 4 * (Tp * D / 2 + Tp / 2 * wide + TILE * (D / 2 + Tp + wide + Tp / 2));
#pragma omp parallel num_threads(n_threads)
    {
        uint32_t *keys = aligned_alloc(64, UP(size, 64)), *values = keys + Tp * D / 2;
#pragma omp for schedule(dynamic)
        for (long j = 0; j < x->B * x->K; j++) {
            long b = j / x->K, k = j % x->K;
            panels(&x->k, b, k, T, D, keys);
            pairs(&x->v, b, k, 0, T, D, Tp, wide, values);
            for (long g = 0; g < G; g++) forward_head(x, b, k * G + g, keys, values, (char *)(values + Tp / 2 * wide));
        }
        free(keys);
    }
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

enum { KEYS, VALUES, KEY_PAIRS, DK, DV, Q, DY, Q_PAIRS, DY_PAIRS, P, DS, SCORES, DP, DS_ROWS, SUMS, N_PARTS };

/* Sizes of a thread's memory. Of a key head: panels of keys and values, pairs of keys, sums of gradients. Of a block of
queries: rows, pairs, and the weights and the gradients of the scores, (BLOCK / 2, Tp) pairs of queries. Of a tile: the
rest. */
static void lay_out(long Tp, long D, long wide, long *sizes) {
    const long all[] = {Tp * D / 2,       Tp * D / 2,       Tp / 2 * wide,  Tp * wide, Tp * wide, BLOCK * D / 2,
                        BLOCK * D / 2,    BLOCK / 2 * wide, BLOCK / 2 * wide, BLOCK / 2 * Tp, BLOCK / 2 * Tp,
                        TILE * Tp,        TILE * Tp,        TILE * Tp / 2,  TILE * wide};
    for (int i = 0; i < N_PARTS; i++) sizes[i] = UP(all[i], 16);
}

static void backward_block(const Attention *x, uint32_t **w, long b, long h, long i) {
    const long T = x->T, D = x->D, wide = UP(D, LANES), Tp = UP(T, PANEL), n = T - i < BLOCK ? T - i : BLOCK;
    float *scores = (float *)w[SCORES], *dp = (float *)w[DP], *sums = (float *)w[SUMS];
    num *ds_rows = (num *)w[DS_ROWS];
    long begin = T;
    rows(&x->q, b, h, i, n, D, BLOCK, w[Q]);
    rows(&x->dy, b, h, i, n, D, BLOCK, w[DY]);
    pairs(&x->q, b, h, i, n, D, BLOCK, wide, w[Q_PAIRS]);
    pairs(&x->dy, b, h, i, n, D, BLOCK, wide, w[DY_PAIRS]);
    for (long t = 0; t < n; t += TILE) {
        long low = key_range(x, b, i + t).low;
        begin = low < begin ? low : begin;
    }
    for (long t = 0; t < n; t += TILE) {
        const KeyRange range = key_range(x, b, i + t);
        const long low = range.low, high = range.high, F = D / 2, at = low * F, row = t * F;
        prefetch_next(x, b, h, i + t, &x->dy);
        product(w[Q] + row, F, 1, w[KEYS] + at, PANEL, PANEL * F, F, scores + low, Tp, high - low, 0);
        product(w[DY] + row, F, 1, w[VALUES] + at, PANEL, PANEL * F, F, dp + low, Tp, high - low, 0);
        for (long r = 0; r < TILE; r += 2) {
            memset(w[P] + (t + r) / 2 * Tp + begin, 0, 4 * (low - begin));
            memset(w[DS] + (t + r) / 2 * Tp + begin, 0, 4 * (low - begin));
            float mean[2]; /* of dp, by the weights of a query */
            for (long e = 0; e < 2; e++) {
                float lse = r + e < range.n ? x->lse[(b * x->H + h) * T + i + t + r + e] : 0;
                vec total = {0};
                for (long j = low; j < high; j += LANES) {
                    vec *p = (vec *)(scores + (r + e) * Tp + j);
                    *p = where(seen(&range, r + e, j), exponential(*p * x->scale - lse), 0);
                    total += where(seen(&range, r + e, j), *p * *(vec *)(dp + (r + e) * Tp + j), 0);
                }
                mean[e] = _mm512_reduce_add_ps((__m512)total);
            }
            for (long j = low; j < high; j += LANES) {
                vec p[2], ds[2];
                for (long e = 0; e < 2; e++) {
                    p[e] = *(vec *)(scores + (r + e) * Tp + j);
                    ds[e] = p[e] * (*(vec *)(dp + (r + e) * Tp + j) - mean[e]) * x->scale;
                    ds[e] = where(seen(&range, r + e, j), ds[e], 0);
                    _mm256_storeu_si256((__m256i *)(ds_rows + (r + e) * Tp + j), rounded(ds[e]));
                }
                *(ints *)(w[P] + (t + r) / 2 * Tp + j) = paired(p[0], p[1]);
                *(ints *)(w[DS] + (t + r) / 2 * Tp + j) = paired(ds[0], ds[1]);
            }
        }
        const uint32_t *ds_pairs = (uint32_t *)(ds_rows + low), *keys = w[KEY_PAIRS] + low / 2 * wide;
        product(ds_pairs, Tp / 2, 1, keys, wide, PANEL, (high - low) / 2, sums, wide, wide, 0);
        for (long r = 0; r < range.n; r++) store_row(row_of(&x->dq, b, h, i + t + r), sums + r * wide, 1, D);
    }
    for (long j = begin; j < UP(i + n, TILE); j += TILE) { /* queries before a key do not see it */
        const long skip = j > i ? (j - i) / 2 : 0, k = UP(n, TILE) / 2 - skip;
        float *dv = (float *)w[DV] + j * wide, *dk = (float *)w[DK] + j * wide;
        product(w[P] + skip * Tp + j, 1, Tp, w[DY_PAIRS] + skip * wide, wide, PANEL, k, dv, wide, wide, 1);
        product(w[DS] + skip * Tp + j, 1, Tp, w[Q_PAIRS] + skip * wide, wide, PANEL, k, dk, wide, wide, 1);
    }
}

void attention_backward(const Attention *x, int n_threads) {
    const long T = x->T, D = x->D, wide = UP(D, LANES), Tp = UP(T, PANEL), G = x->H / x->K;
    long sizes[N_PARTS], all = 0;
    lay_out(Tp, D, wide, sizes);
    for (int i = 0; i < N_PARTS; i++) all += sizes[i];
#pragma omp parallel num_threads(n_threads)
    {
        uint32_t *w[N_PARTS], *memory = aligned_alloc(64, 4 * all);
        for (long i = 0, at = 0; i < N_PARTS; at += sizes[i++]) w[i] = memory + at;
        const float *dk = (float *)w[DK], *dv = (float *)w[DV];
#pragma omp for schedule(dynamic)
        for (long j = 0; j < x->B * x->K; j++) {
            long b = j / x->K, k = j % x->K;
            panels(&x->k, b, k, T, D, w[KEYS]);
            panels(&x->v, b, k, T, D, w[VALUES]);
            pairs(&x->k, b, k, 0, T, D, Tp, wide, w[KEY_PAIRS]);
            memset(w[DK], 0, 4 * sizes[DK]), memset(w[DV], 0, 4 * sizes[DV]);
            for (long g = 0; g < G; g++)
                for (long i = 0; i < T; i += BLOCK) backward_block(x, w, b, k * G + g, i);
            for (long t = 0; t < T; t++) {
                store_row(row_of(&x->dk, b, k, t), dk + t * wide, 1, D);
                store_row(row_of(&x->dv, b, k, t), dv + t * wide, 1, D);
            }
        }
        free(memory);
    }
}
