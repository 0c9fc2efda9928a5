/* AMX: 8 tiles of 16 rows of 16 floats, or of 32 bfloat16 as factors; vectors are those of AVX-512.
 * Scores: 2 tiles of queries * 2 of keys are sums in tiles 0 to 3, tiles 4 and 5 hold queries, and 6 and 7 keys.
 * Output: 2 tiles of queries * 2 of values are sums in tiles 0 to 3, tiles 4 and 5 hold weights, and 6 and 7 values.
 * Gradients of keys: 2 tiles of columns * 2 of keys are sums, tiles 4 and 5 hold columns of queries, and 6 and 7 weights.
 *
 * A number is the sum of PARTS bfloat16 numbers, exactly: bfloat16 of 1, float16 of 2 and float32 of 3. A product of two
 * numbers is the sum of products of their parts, the smallest first; those below the last digit of a float32 are left out.
 * The instructions take numbers that are no normal bfloat16 (below 1.2e-38) as 0, so of a float32 below 7.7e-34 digits are lost.
 * Without the instructions (emulated.h) the same code is plain C, to test it. */
#if defined(__AMX_BF16__)
#include <immintrin.h>
#else
#include "emulated.h"
#endif
enum { VL = 16, NV = 2, RS = 32 };
#include "vectors.h"

#if PARTS == 1
typedef uint16_t Number; /* of q, k, v and the output */
enum { SCORE_PRODUCTS = 1, OUTPUT_PRODUCTS = 1 };
static const int8_t OF_QUERY[] = {0}, OF_KEY[] = {0}; /* the parts of each product */
#elif PARTS == 2
typedef _Float16 Number;
enum { SCORE_PRODUCTS = 4, OUTPUT_PRODUCTS = 3 }; /* scores are exact */
static const int8_t OF_QUERY[] = {1, 1, 0, 0}, OF_KEY[] = {1, 0, 1, 0};
#else
typedef float Number;
enum { SCORE_PRODUCTS = 6, OUTPUT_PRODUCTS = 6 };
static const int8_t OF_QUERY[] = {2, 1, 0, 1, 0, 0}, OF_KEY[] = {0, 1, 2, 0, 1, 0};
#endif
typedef uint32_t Packed; /* a pair of bfloat16, the first in the lower half */
typedef Packed vp __attribute__((vector_size(64), may_alias));
typedef Packed vpu __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));
enum { T = 256, SCALED_LATER = 1, SEPARATE_SCORES = 1, BUFFERS = 2, WEIGHT_SIZE = 2 * PARTS * T }; /* T: pairs of a tile */

INLINE int64_t tiles_of(int64_t d) { return up(d, 32) / 32; } /* of 16 queries or keys */
INLINE int64_t output_width(int64_t dv) { return up(dv, 32); }
INLINE int64_t query_size(int64_t d) { return 2 * PARTS * tiles_of(d) * T; } /* of a strip [16 rows][part][tile] */
INLINE int64_t key_size(int64_t d) { return PARTS * tiles_of(d) * 2 * T; }   /* of a panel [part][tile][16 keys] */
INLINE int64_t value_size(int64_t dv) { return PARTS * output_width(dv) / VL * T; } /* of a panel [part][16 values] */

/* Tiles are configured while a thread makes products; then whoever used them before has them as before. */
typedef struct { uint8_t palette, row, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } __attribute__((aligned(64))) Tiles;
_Static_assert(sizeof(Tiles) == 64, "size");
static _Thread_local Tiles tiles_before;
static void begin_products(void) {
    Tiles tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
    _tile_storeconfig(&tiles_before);
    _tile_loadconfig(&tiles);
}
static void end_products(void) {
    if (tiles_before.palette) _tile_loadconfig(&tiles_before);
    else _tile_release();
}
/* All stores before a load of a tile: the intrinsic of gcc does not say that it reads memory. */
#define STORED __asm__ volatile("" ::: "memory")

/* ---- Numbers and parts ------------------------------------------------------------------------------------------ */

#if defined(__AVX512F__)
INLINE vf maximum(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); } /* b if one is NaN */
INLINE vf minimum(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE int any(vi x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0; } /* whether a lane of a comparison is true */
#else
INLINE vf maximum(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf minimum(vf a, vf b) { return choose(a < b, a, b); }
INLINE int any(vi x) { int y = 0; for (int i = 0; i < VL; i++) y |= x[i]; return y != 0; }
#endif
#if PARTS == 1
INLINE float widened(Number x) { const uint32_t bits = (uint32_t)x << 16; float y; memcpy(&y, &bits, 4); return y; }
INLINE Number rounded(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (Number)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE vp upper_zero(const Number *x) { /* 16 numbers as the lower halves */
#if defined(__AVX512F__)
    return (vp)_mm512_cvtepu16_epi32((__m256i)*(const vh *)x);
#else
    return __builtin_convertvector(*(const vh *)x, vp);
#endif
}
#else
INLINE float widened(Number x) { return (float)x; }
INLINE Number rounded(float x) { return (Number)x; }
#endif

#if PARTS == 2
INLINE vf sixteen(const Number *x) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)*(const vh *)x);
#else
    vf y;
    for (int i = 0; i < 16; i++) y[i] = (float)x[i];
    return y;
#endif
}
#elif PARTS == 3
INLINE vf sixteen(const Number *x) { return *(const vu *)x; }
#endif

/* The parts of x[i] beside those of y[i]: to[part * stride] gets 16 pairs. */
INLINE void put_parts(vf x, vf y, Packed *to, int64_t stride) {
    UNROLL for (int part = 0; part < PARTS; part++) {
        const vp a = (vp)x & 0xffff0000, b = (vp)y & 0xffff0000;
        *(vp *)(to + part * stride) = a >> 16 | b;
        x -= (vf)a, y -= (vf)b;
    }
}

/* Rounded parts of x[i] beside those of y[i]; as `put_parts`, which cuts the digits after the last part. */
INLINE void put_pairs(vf x, vf y, Packed *to, int64_t stride) {
#if PARTS == 1
    const vp a = (vp)x + 0x7fff + ((vp)x >> 16 & 1), b = (vp)y + 0x7fff + ((vp)y >> 16 & 1);
    const vp nan = (vp){0} + 0x7fc00000;
    (void)stride;
    *(vp *)to = (vp)choose(x == x, (vf)a, (vf)nan) >> 16 | ((vp)choose(y == y, (vf)b, (vf)nan) & 0xffff0000);
#else
    put_parts(x, y, to, stride);
#endif
}

/* The weights of one row on a panel as factors. */
INLINE void put_weights(const vf w[NV], int64_t row, Packed *to) {
    to += row / 16 * PARTS * T + row % 16 * 16;
#if PARTS > 1
    put_parts(w[0], w[1], to, T);
#elif defined(__AVX512BF16__)
    *(__m512i *)to = (__m512i)_mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]);
#else
    for (int j = 0; j < PW; j += 2)
        to[j / 2] = rounded(w[j / VL][j % VL]) | (Packed)rounded(w[j / VL][j % VL + 1]) << 16;
#endif
}
/* The keys whose weights, and values, are pair i of a panel. */
INLINE int first_of_pair(int i) { return PARTS == 1 ? 2 * i : i; }
INLINE int second_of_pair(int i) { return PARTS == 1 ? 2 * i + 1 : i + 16; }

/* ---- Packing ---------------------------------------------------------------------------------------------------- */

/* The next n numbers of x, or fewer if only `left` exist, and then zeros, which `memory` holds. */
INLINE const Number *padded(const Number *x, int64_t left, int64_t n, Number *memory) {
    if (left >= n) return x;
    memset(memory, 0, (size_t)n * sizeof *x);
    if (left > 0) memcpy(memory, x, (size_t)left * sizeof *x);
    return memory;
}
/* 32 numbers of a query or a key, `left` of which exist: to[part * stride] gets 16 pairs. */
INLINE void pack_row(const Number *x, int64_t left, Packed *to, int64_t stride) {
    Number memory[32];
    x = padded(x, left, 32, memory);
#if PARTS == 1
    (void)stride, *(vp *)to = *(const vpu *)x;
#else
    put_parts(sixteen(x), sixteen(x + 16), to, stride); /* number i beside number i + 16, of queries and keys alike */
#endif
}

/* Pack a strip, `rows` queries of which exist. */
static void pack_queries(const Number *q, int64_t stride, int64_t rows, int64_t d, float scale, Packed *to) {
    (void)scale; /* numbers would be rounded */
    for (int64_t r = 0; r < RS; r++)
        for (int64_t t = 0; t < tiles_of(d); t++)
            pack_row(q + r * stride + t * 32, r < rows ? d - t * 32 : 0,
                     to + (r / 16 * PARTS * tiles_of(d) + t) * T + r % 16 * 16, tiles_of(d) * T);
}

INLINE void transpose(const Packed *from, Packed *to) { /* 16 * 16 pairs */
    vp a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = *(const vp *)(from + i * 16);
#define SHUFFLE __builtin_shufflevector
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = SHUFFLE(a[i], a[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        b[i + 1] = SHUFFLE(a[i], a[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        a[i + 2 * j] = SHUFFLE(b[i + j], b[i + j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        a[i + 2 * j + 1] = SHUFFLE(b[i + j], b[i + j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    UNROLL for (int i = 0; i < 16; i += 8) UNROLL for (int j = 0; j < 4; j++) {
        b[i + j] = SHUFFLE(a[i + j], a[i + j + 4], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        b[i + j + 4] = SHUFFLE(a[i + j], a[i + j + 4], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        *(vp *)(to + i * 16) = SHUFFLE(b[i], b[i + 8], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        *(vp *)(to + (i + 8) * 16) = SHUFFLE(b[i], b[i + 8], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
#undef SHUFFLE
}

/* Pack a panel of keys: 0 unless their bit of `exist` is 1, so that NaN in the others is harmless. */
static void pack_keys(const Number *k, int64_t stride, uint32_t exist, int64_t d, Packed *to) {
    for (int64_t t = 0; t < tiles_of(d); t++)
        for (int half = 0; half < 2; half++) {
            Packed rows[PARTS * T] __attribute__((aligned(64)));
            for (int j = 0; j < 16; j++)
                pack_row(k + (half * 16 + j) * stride + t * 32, exist >> (half * 16 + j) & 1 ? d - t * 32 : 0, rows + j * 16, T);
            for (int part = 0; part < PARTS; part++)
                transpose(rows + part * T, to + ((part * tiles_of(d) + t) * 2 + half) * T);
        }
}
static void pack_values(const Number *v, int64_t stride, uint32_t exist, int64_t dv, Packed *to) {
    const int64_t tiles = output_width(dv) / VL;
    for (int64_t t = 0; t < tiles; t++)
        for (int i = 0; i < 16; i++) {
            Number memory[32];
            const int a = first_of_pair(i), b = second_of_pair(i);
            const Number *x = padded(v + a * stride + t * 16, exist >> a & 1 ? dv - t * 16 : 0, 16, memory);
            const Number *y = padded(v + b * stride + t * 16, exist >> b & 1 ? dv - t * 16 : 0, 16, memory + 16);
#if PARTS == 1
            *(vp *)(to + t * T + i * 16) = upper_zero(x) | upper_zero(y) << 16;
#else
            put_parts(sixteen(x), sixteen(y), to + t * T + i * 16, tiles * T);
#endif
        }
}

/* ---- Products --------------------------------------------------------------------------------------------------- */

/* The largest and the smallest score of each row on a panel, by lane. */
INLINE void find_extremes(const float *s, vf top[RS], vf *low) {
    UNROLL for (int r = 0; r < RS; r++) {
        const vf a = load(s + r * PW), b = load(s + r * PW + VL);
        top[r] = maximum(b, maximum(a, top[r]));
        if (low) low[r] = minimum(b, minimum(a, low[r]));
    }
}

/* Scores of a strip and some panels of keys, and the largest of each row by lane, and the smallest unless `low` is NULL, which
 * are found for one panel while the tiles compute the next. */
static void scores(const Packed *q, const Packed *k, int64_t panels, int64_t d, float *s, vf top[RS], vf *low) {
    const int64_t tiles = tiles_of(d), rows = PARTS * tiles * T;
    STORED;
    if (PARTS == 1 && tiles == 2) { /* all queries stay in tiles 4 to 7: half as many loads */
        _tile_loadd(4, q, 64); _tile_loadd(5, q + T, 64); _tile_loadd(6, q + rows, 64); _tile_loadd(7, q + rows + T, 64);
        for (int64_t panel = 0; panel < panels; panel++, k += 4 * T, s += RS * PW) {
            for (int half = 0; half < 2; half++) {
                _tile_zero(0); _tile_zero(1);
                _tile_stream_loadd(2, k + half * T, 64); _tile_stream_loadd(3, k + (2 + half) * T, 64);
                _tile_dpbf16ps(0, 4, 2); _tile_dpbf16ps(1, 6, 2); _tile_dpbf16ps(0, 5, 3); _tile_dpbf16ps(1, 7, 3);
                _tile_stored(0, s + half * VL, PW * 4); _tile_stored(1, s + 16 * PW + half * VL, PW * 4);
            }
            if (panel) find_extremes(s - RS * PW, top, low);
        }
    } else
        for (int64_t panel = 0; panel < panels; panel++, k += key_size(d), s += RS * PW) {
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            for (int i = 0; i < SCORE_PRODUCTS; i++)
                for (int64_t t = 0; t < tiles; t++) {
                    const Packed *a = q + (OF_QUERY[i] * tiles + t) * T, *b = k + (OF_KEY[i] * tiles + t) * 2 * T;
                    _tile_loadd(4, a, 64); _tile_stream_loadd(6, b, 64);
                    _tile_stream_loadd(7, b + T, 64); _tile_loadd(5, a + rows, 64);
                    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
                }
            _tile_stored(0, s, PW * 4); _tile_stored(1, s + VL, PW * 4);
            _tile_stored(2, s + 16 * PW, PW * 4); _tile_stored(3, s + 16 * PW + VL, PW * 4);
            if (panel) find_extremes(s - RS * PW, top, low);
        }
    find_extremes(s - RS * PW, top, low);
}

/* The output of a strip that waits: weights and values on some panels, to be added to o [RS][width] in steps of a panel and 2
 * tiles of values, which are made between the weights of the rows of the next strip. Nothing else uses tiles meanwhile. */
typedef struct { const Packed *p, *v; float *o; int64_t panels, width, tile, panel, each; } Late;

INLINE void start_output(const Packed *p, int64_t panels, const Packed *v, int64_t width, float *o, Late *late) {
    *late = (Late){p, v, o, panels, width, 0, 0, up(panels * (width / 32), RS) / RS};
}
static void continue_output(Late *late, int64_t steps) {
    const int64_t width = late->width, tiles = width / VL;
    STORED;
    for (; steps && late->tile < tiles; steps--) {
        float *o = late->o + late->tile * VL;
        if (!late->panel) {
            _tile_loadd(0, o, width * 4); _tile_loadd(1, o + VL, width * 4);
            _tile_loadd(2, o + 16 * width, width * 4); _tile_loadd(3, o + 16 * width + VL, width * 4);
        }
        for (int i = SCORE_PRODUCTS - OUTPUT_PRODUCTS; i < SCORE_PRODUCTS; i++) {
            const Packed *a = late->p + late->panel * WEIGHT_SIZE + OF_QUERY[i] * T;
            const Packed *b = late->v + ((late->panel * PARTS + OF_KEY[i]) * tiles + late->tile) * T;
            _tile_loadd(4, a, 64); _tile_loadd(5, a + PARTS * T, 64);
            _tile_stream_loadd(6, b, 64); _tile_stream_loadd(7, b + T, 64);
            _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        }
        if (++late->panel < late->panels) continue;
        _tile_stored(0, o, width * 4); _tile_stored(1, o + VL, width * 4);
        _tile_stored(2, o + 16 * width, width * 4); _tile_stored(3, o + 16 * width + VL, width * 4);
        late->panel = 0, late->tile += 2;
    }
}
INLINE void advance_output(Late *late) { continue_output(late, late->each); }
INLINE void finish_output(Late *late) { continue_output(late, INT64_MAX); }

/* ---- Gradients of keys ------------------------------------------------------------------------------------------ */

/* Sums of weights^T * rows are made as rows^T * weights, which need no transposition of the weights: [panel][width][PW].
 * Packed are rows of queries [part][16 columns][16 pairs of queries], and weights [part][16 keys][pairs of queries][16]. */
INLINE int64_t row_size(int64_t d) { return value_size(d); } /* of a strip, as of a panel */
_Static_assert((int)RS == (int)PW, "the queries of a strip are packed as the values of a panel");
INLINE int64_t place_of_sum(int64_t key, int64_t i, int64_t width) { return (key / PW * width + i) * PW + key % PW; }
static void pack_rows(const Number *x, int64_t stride, int64_t rows, int64_t d, Packed *to) {
    pack_values(x, stride, rows < RS ? (1u << rows) - 1 : UINT32_MAX, d, to);
    for (Packed *end = to + row_size(d); to < end; to += T) transpose(to, to);
}

/* Add weights^T * rows of a block to the keys of a run; a strip has the panels of its span only. `factors` is memory for those of
 * all strips on a panel. */
static void add_keys(const float *p, int64_t panels, int64_t strips, const int16_t *spans, const Packed *rows, int64_t width,
                     Packed *factors, float *to) {
    const int64_t apart = RS * (panels + 1) * PW, tiles = width / VL;
    for (int64_t panel = 0; panel < panels; panel++, p += RS * PW, to += width * PW) {
        int64_t from = strips, end = 0;
        for (int64_t strip = 0; strip < strips; strip++) {
            if (panel < spans[2 * strip] || panel >= spans[2 * strip + 1]) continue;
            from = min64(from, strip), end = strip + 1;
            for (int i = 0; i < 16; i++)
                for (int half = 0; half < 2; half++) {
                    const float *x = p + strip * apart + half * VL;
                    put_pairs(load(x + first_of_pair(i) * PW), load(x + second_of_pair(i) * PW),
                              factors + strip * WEIGHT_SIZE + half * T + i * 16, 2 * T);
                }
        }
        STORED;
        for (int64_t t = 0; t < tiles && from < end; t += 2) {
            float *sums = to + t * VL * PW;
            _tile_loadd(0, sums, PW * 4); _tile_loadd(1, sums + VL, PW * 4);
            _tile_loadd(2, sums + 16 * PW, PW * 4); _tile_loadd(3, sums + 16 * PW + VL, PW * 4);
            for (int64_t strip = from; strip < end; strip++) {
                if (panel < spans[2 * strip] || panel >= spans[2 * strip + 1]) continue;
                for (int i = SCORE_PRODUCTS - OUTPUT_PRODUCTS; i < SCORE_PRODUCTS; i++) {
                    const Packed *a = rows + strip * PARTS * tiles * T + (OF_QUERY[i] * tiles + t) * T;
                    const Packed *b = factors + strip * WEIGHT_SIZE + OF_KEY[i] * 2 * T;
                    _tile_loadd(4, a, 64); _tile_loadd(5, a + T, 64); _tile_loadd(6, b, 64); _tile_loadd(7, b + T, 64);
                    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, sums, PW * 4); _tile_stored(1, sums + VL, PW * 4);
            _tile_stored(2, sums + 16 * PW, PW * 4); _tile_stored(3, sums + 16 * PW + VL, PW * 4);
        }
    }
}
