/* A decoding step on a CPU in one call: the next position of some texts, through all layers, to their logits.

Torch needs hundreds of calls for it, each with its own start of threads. And what a row gets here is the same to the
bit whatever rows are beside it and however many threads there are: each output is summed in one fixed order.

Compiled by decoding.py when a program first generates, with or without BFLOAT16 and INT8. A matrix (N, K) lies in
blocks of WIDTH outputs, (N / WIDTH, K / PAIR, WIDTH, PAIR), which a thread reads from front to back: memory then gives
twice what it gives for several rows of a matrix side by side. Shapes: as in model.py; M rows, F ffn_dim.

With INT8 weights are 8-bit integers with a scale for GROUP inputs of each output, and what is multiplied by them is
rounded to 16 bits with a scale for each row. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <omp.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef BFLOAT16
typedef uint16_t num; /* keys, values, hidden states; without INT8 also weights */
#else
typedef float num;
#endif
#ifdef INT8
typedef int8_t weight;
typedef int16_t input; /* what is multiplied by weights */
typedef uint16_t word; /* PAIR weights */
#define GROUP 64       /* at most 512: their products then add up within 32 bits */
#define SCALE(type) (sizeof(float) / sizeof(type))
#else
typedef num weight, input;
typedef uint32_t word;
#define GROUP 1
#define SCALE(type) 0
#endif
#define PAIR (sizeof(word) / sizeof(weight)) /* inputs whose products are added at once */

#define WIDTH 32
#ifdef __AVX512F__
#define LANES 16
#define ROWS 8 /* rows that share a block read into registers */
#else
#define LANES 8
#define ROWS 2
#endif
#define VECS (WIDTH / LANES)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t shorts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t bytes __attribute__((vector_size(2 * LANES), aligned(4), may_alias));

typedef struct {
    const weight *q, *k, *v, *o, *gate, *up, *down;
    const float *q_bias, *k_bias, *v_bias, *q_norm, *k_norm; /* NULL: the model has none */
    const float *attention_norm, *mlp_norm;
} Layer;

typedef struct {
    long n_layer, C, H, K, D, F, V;
    double eps;
    const Layer *layers;
    const float *norm;
    const weight *head;
} Model;

INLINE float number(num x) {
#ifdef BFLOAT16
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
#else
    return x;
#endif
}

INLINE num rounded(float f) {
#ifdef BFLOAT16
    uint32_t u;
    memcpy(&u, &f, 4);
    return f != f ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
#else
    return f;
#endif
}

INLINE float nearest(float x) { return x + 12582912.f - 12582912.f; } /* integer; |x| below 2^22 */

INLINE float exponential(float x) { /* within 2e-7; a loop over it becomes vector instructions */
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    float n = nearest(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f, p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    int32_t e = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &e, 4);
    return p * power;
}

/* Weights of an output in a block, with the room for its scales. */
INLINE long width_of(long K) { return K + (K + GROUP - 1) / GROUP * SCALE(weight); }

/* Lay out a matrix of words (N, K / PAIR) in blocks, with zeros for the rows that the last one lacks. With INT8 each
group of inputs begins with its scales, scales (groups, N). */
void lay_out(const word *w, const float *scales, word *blocks, long N, long K, int n_threads) {
    const long n_words = K / PAIR;
#pragma omp parallel for num_threads(n_threads)
    for (long n = 0; n < N; n += WIDTH) {
        word *to = blocks + n * width_of(K) / PAIR;
        const long most = N - n < WIDTH ? N - n : WIDTH;
        for (long k = 0; k < n_words; k++) {
            if (scales && k * PAIR % GROUP == 0) {
                memcpy(to, scales + k * PAIR / GROUP * N + n, most * sizeof(float));
                to += WIDTH * SCALE(word);
            }
            for (long i = 0; i < WIDTH; i++) *to++ = i < most ? w[(n + i) * n_words + k] : 0;
        }
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Ask for the weights that will be read soon: a processor's own prefetching gives up to a fifth less. */
INLINE void prefetch(const weight *w) {
    for (int i = 0; i < WIDTH * sizeof(word); i += 64) __builtin_prefetch((const char *)w + 4096 + i);
}

#ifdef INT8
/* widened: the numbers of `LANES` pairs with 16 bits. products: for each pair of numbers the sum of their products. */
#if LANES == 16 && defined __AVX512BW__
INLINE shorts widened(const int8_t *w) { return (shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)w)); }
INLINE ints products(shorts a, shorts b) { return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif LANES == 8 && defined __AVX2__
INLINE shorts widened(const int8_t *w) { return (shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)w)); }
INLINE ints products(shorts a, shorts b) { return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#else
INLINE shorts widened(const int8_t *w) { return __builtin_convertvector(*(const bytes *)w, shorts); }
INLINE ints products(shorts a, shorts b) {
    ints x = (ints)a, y = (ints)b;
    return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
}
#endif

/* y (R, WIDTH) = x (R, K) times a block. */
INLINE void multiply(const weight *w, const input *x, long K, float y[][WIDTH], const int R) {
    const long row = K + SCALE(input);
    memset(y, 0, R * WIDTH * sizeof(float));
    for (long begin = 0; begin < K; begin += GROUP) {
        const vec *scales = (const vec *)w;
        ints sums[ROWS][VECS];
        w += WIDTH * SCALE(weight);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++) sums[r][v] = (ints){0};
        for (long k = begin; k < K && k < begin + GROUP; k += PAIR, w += WIDTH * PAIR) {
            prefetch(w);
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++) {
                shorts both = widened(w + v * LANES * PAIR);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    int32_t pair;
                    memcpy(&pair, x + r * row + SCALE(input) + k, 4);
                    sums[r][v] += products(both, (shorts)((ints){0} + pair));
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++)
                *(vec *)(y[r] + v * LANES) += scales[v] * __builtin_convertvector(sums[r][v], vec);
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < WIDTH; i++) y[r][i] *= *(const float *)(x + r * row);
}

/* Return x (M, K) as inputs of a product: in `rows`, rounded to 16 bits, each row after its scale. */
static const input *inputs(const num *x, input *rows, long M, long K) {
    for (long m = 0; m < M; m++, x += K) {
        input *row = rows + m * (K + SCALE(input));
        float most = 1e-30f, nothing = 0;
#pragma omp simd reduction(max : most) reduction(+ : nothing)
        for (long k = 0; k < K; k++) {
            float size = fabsf(number(x[k]));
            most = size > most ? size : most;
            nothing += size * 0; /* or NaN, which must not get lost */
        }
        *(float *)row = most / 32767 + nothing;
        if (nothing != 0) { /* NaN in all that this row gives, which integers do not have */
            memset(row + SCALE(input), 0, K * sizeof *row);
            continue;
        }
        for (long k = 0; k < K; k++) row[SCALE(input) + k] = (int32_t)nearest(number(x[k]) * (32767 / most));
    }
    return rows;
}
#else
/* y (R, WIDTH) = x (R, K) times a block. */
INLINE void multiply(const weight *w, const input *x, long K, float y[][WIDTH], const int R) {
    vec sums[ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) sums[r][v] = (vec){0};
    for (long k = 0; k < K; k += PAIR, w += WIDTH * PAIR) {
        prefetch(w);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++) {
                const num *xs = x + r * K + k;
#ifdef BFLOAT16
                bits both = *(const bits *)(w + v * LANES * PAIR);
#ifdef __AVX512BF16__
                int32_t pair;
                memcpy(&pair, xs, 4);
                sums[r][v] = (vec)_mm512_dpbf16_ps((__m512)sums[r][v], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)both);
#else
                sums[r][v] += number(xs[0]) * (vec)(both << 16);
                sums[r][v] += number(xs[1]) * (vec)(both & 0xffff0000u);
#endif
#else
                sums[r][v] += xs[0] * *(const vec *)(w + v * LANES);
#endif
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) *(vec *)(y[r] + v * LANES) = sums[r][v];
}

static const input *inputs(const num *x, input *rows, long M, long K) { return (const input *)x; }
#endif

/* Up to ROWS rows; each is computed as if it were alone. */
static void multiply_rows(const weight *w, const input *x, long K, float y[][WIDTH], long R) {
    switch (R) {
    case 1: multiply(w, x, K, y, 1); break;
    case 2: multiply(w, x, K, y, 2); break;
#if ROWS > 2
    case 3: multiply(w, x, K, y, 3); break;
    case 4: multiply(w, x, K, y, 4); break;
    case 5: multiply(w, x, K, y, 5); break;
    case 6: multiply(w, x, K, y, 6); break;
    case 7: multiply(w, x, K, y, 7); break;
    case 8: multiply(w, x, K, y, 8); break;
#endif
    }
}

/* y (M, stride), N of its columns = or += x (M, K) times a matrix (+ bias); the part of thread t of T. */
static void project(const weight *w, const float *bias, const input *x, float *y, long M, long K, long N, long stride,
                    int add, long t, long T) {
    long n_blocks = (N + WIDTH - 1) / WIDTH;
    float found[ROWS][WIDTH];
    for (long b = n_blocks * t / T; b < n_blocks * (t + 1) / T; b++)
        for (long m = 0, n = b * WIDTH, most = N - n < WIDTH ? N - n : WIDTH; m < M; m += ROWS) {
            long R = M - m < ROWS ? M - m : ROWS;
            multiply_rows(w + n * width_of(K), x + m * (K + SCALE(input)), K, found, R);
            for (long r = 0; r < R; r++) {
                float *to = y + (m + r) * stride + n;
                for (long i = 0; i < most; i++) to[i] = found[r][i] + (add ? to[i] : bias ? bias[n + i] : 0);
            }
        }
}

/* y (M, F) = silu(gate x) * (up x); the part of thread t of T. */
static void gated(const weight *gate, const weight *up, const input *x, num *y, long M, long K, long F, long t, long T) {
    long n_blocks = (F + WIDTH - 1) / WIDTH;
    float g[ROWS][WIDTH], u[ROWS][WIDTH];
    for (long b = n_blocks * t / T; b < n_blocks * (t + 1) / T; b++)
        for (long m = 0, n = b * WIDTH, most = F - n < WIDTH ? F - n : WIDTH; m < M; m += ROWS) {
            long R = M - m < ROWS ? M - m : ROWS;
            const input *rows = x + m * (K + SCALE(input));
            multiply_rows(gate + n * width_of(K), rows, K, g, R);
            multiply_rows(up + n * width_of(K), rows, K, u, R);
            for (long r = 0; r < R; r++) {
                for (long i = 0; i < WIDTH; i++) g[r][i] = g[r][i] / (1 + exponential(-g[r][i])) * u[r][i];
                for (long i = 0; i < most; i++) y[(m + r) * F + n + i] = rounded(g[r][i]);
            }
        }
}

/* y (M, N) = x (M, K) times a matrix (+ bias): for prompts. rows: memory for the inputs. */
void product(const weight *w, const float *bias, const num *x, input *rows, float *y, long M, long K, long N,
             int n_threads) {
#ifdef INT8
#pragma omp parallel for num_threads(n_threads)
    for (long m = 0; m < M; m++) inputs(x + m * K, rows + m * (K + SCALE(input)), 1, K);
#else
    rows = (input *)x;
#endif
#pragma omp parallel num_threads(n_threads)
    project(w, bias, rows, y, M, K, N, N, 0, omp_get_thread_num(), omp_get_num_threads());
}

/* ---- everything else --------------------------------------------------------------------------------------------- */

INLINE float scale_of(const float *x, long n, double eps) { /* 1 / rms */
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++) sum += x[i] * x[i];
    return 1 / sqrtf(sum / n + (float)eps);
}

static void normalize(const float *x, const float *weight, num *y, long M, long C, double eps) {
    for (long m = 0; m < M; m++) {
        float scale = scale_of(x + m * C, C, eps);
        for (long i = 0; i < C; i++) y[m * C + i] = rounded(x[m * C + i] * scale * weight[i]);
    }
}

/* Normalize (if weight) and rotate the pairs (x[i], x[i + D / 2]) of a head. */
static void place(float *x, const float *weight, const float *cos, const float *sin, long D, double eps) {
    if (weight) {
        float scale = scale_of(x, D, eps);
        for (long i = 0; i < D; i++) x[i] *= scale * weight[i];
    }
    for (long i = 0; i < D / 2; i++) {
        float a = x[i], b = x[i + D / 2];
        x[i] = a * cos[i] - b * sin[i];
        x[i + D / 2] = b * cos[i] + a * sin[i];
    }
}

/* Store a new key and value (D) at position n; y (G, D) = attention of the queries (G, D) to positions 0 to n. */
static void attend(const float *q, const float *k, const float *v, num *keys, num *values, long n, long G, long D,
                   float *scores, float *work, num *y) {
    float *row = work, *sums = work + D;
    for (long d = 0; d < D; d++) keys[n * D + d] = rounded(k[d]), values[n * D + d] = rounded(v[d]);
    for (long s = 0; s <= n; s++) {
        for (long d = 0; d < D; d++) row[d] = number(keys[s * D + d]);
        for (long g = 0; g < G; g++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long d = 0; d < D; d++) sum += q[g * D + d] * row[d];
            scores[g * (n + 1) + s] = sum;
        }
    }
    float scale = 1 / sqrtf(D);
    for (long g = 0; g < G; g++) {
        float *p = scores + g * (n + 1), most = -INFINITY, total = 0;
#pragma omp simd reduction(max : most)
        for (long s = 0; s <= n; s++) most = p[s] > most ? p[s] : most;
#pragma omp simd reduction(+ : total)
        for (long s = 0; s <= n; s++) {
            p[s] = exponential((p[s] - most) * scale);
            total += p[s];
        }
        for (long s = 0; s <= n; s++) p[s] /= total;
    }
    memset(sums, 0, G * D * sizeof(float));
    for (long s = 0; s <= n; s++) {
        for (long d = 0; d < D; d++) row[d] = number(values[s * D + d]);
        for (long g = 0; g < G; g++)
            for (long d = 0; d < D; d++) sums[g * D + d] += scores[g * (n + 1) + s] * row[d];
    }
    for (long i = 0; i < G * D; i++) y[i] = rounded(sums[i]);
}

/* x (M, C): embeddings, overwritten. cos, sin (M, D / 2). positions (M). cache (2 n_layer, M): keys, then values, of
each layer and row, (K, sizes[m] + 1, D); a row whose position is sizes[m] is left as it is. logits (M, V).
shared, own: memory for what the threads share, and own_bytes for each thread's own. */
void step(const Model *model, float *x, const float *cos, const float *sin, const int64_t *positions,
          const int64_t *sizes, num **cache, long M, float *logits, char *shared, char *own, long own_bytes,
          int n_threads) {
    const long C = model->C, H = model->H, K = model->K, D = model->D, F = model->F, G = H / K, E = (H + 2 * K) * D;
    const double eps = model->eps;
    float *qkv = (float *)shared;
    num *found = (num *)(qkv + M * E), *hidden = found + M * H * D;
    const long widest = C > H * D ? (C > F ? C : F) : H * D > F ? H * D : F;
    const long n_inputs = SCALE(input) ? (M * (widest + SCALE(input)) + 31) / 32 * 32 : 0;
#pragma omp parallel num_threads(n_threads)
    {
        const long t = omp_get_thread_num(), T = omp_get_num_threads();
        num *h = (num *)(own + t * own_bytes);              /* (M, C) */
        input *rows = (input *)(h + (M * C + 31) / 32 * 32); /* what INT8 multiplies */
        float *work = (float *)(rows + n_inputs);            /* ((1 + G) D) */
        float *scores = work + (1 + G) * D;                  /* (G, positions) */
        for (long i = 0; i < model->n_layer; i++) {
            const Layer *l = model->layers + i;
            normalize(x, l->attention_norm, h, M, C, eps);
            const input *in = inputs(h, rows, M, C);
            project(l->q, l->q_bias, in, qkv, M, C, H * D, E, 0, t, T);
            project(l->k, l->k_bias, in, qkv + H * D, M, C, K * D, E, 0, t, T);
            project(l->v, l->v_bias, in, qkv + (H + K) * D, M, C, K * D, E, 0, t, T);
#pragma omp barrier
#pragma omp for schedule(dynamic)
            for (long j = 0; j < M * K; j++) {
                long m = j / K, head = j % K, n = positions[m], at = head * (sizes[m] + 1) * D;
                float *q = qkv + m * E + head * G * D, *k = qkv + m * E + (H + head) * D, *v = k + K * D;
                num *y = found + (m * H + head * G) * D;
                if (n == sizes[m]) {
                    memset(y, 0, G * D * sizeof(num));
                    continue;
                }
                for (long g = 0; g < G; g++) place(q + g * D, l->q_norm, cos + m * D / 2, sin + m * D / 2, D, eps);
                place(k, l->k_norm, cos + m * D / 2, sin + m * D / 2, D, eps);
                num *keys = cache[i * M + m] + at, *values = cache[(model->n_layer + i) * M + m] + at;
                attend(q, k, v, keys, values, n, G, D, scores, work, y);
            }
            project(l->o, 0, inputs(found, rows, M, H * D), x, M, H * D, C, C, 1, t, T);
#pragma omp barrier
            normalize(x, l->mlp_norm, h, M, C, eps);
            gated(l->gate, l->up, inputs(h, rows, M, C), hidden, M, C, F, t, T);
#pragma omp barrier
            project(l->down, 0, inputs(hidden, rows, M, F), x, M, F, C, C, 1, t, T);
#pragma omp barrier
        }
        normalize(x, model->norm, h, M, C, eps);
        project(model->head, 0, inputs(h, rows, M, C), logits, M, C, model->V, model->V, 0, t, T);
    }
}
