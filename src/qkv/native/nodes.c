/* Scores of a row as a few weighted nodes: for a smooth function f, sum_j f(s_j) is nearly sum_g count_g f(node_g).
 *
 * The nodes are equally far apart. Each score between two of them adds to the six around it the values of their Lagrange
 * polynomials, so that the sums agree for every polynomial of degree 5 on an interval. A search for the level of a normalizer
 * evaluates a user's function at the nodes first, not at all scores (qkv/engine/level.py).
 */
enum { INTERVALS = 64, NODES = INTERVALS + 5, AROUND = 8 }; /* AROUND: 6 nodes around an interval, as a vector */
typedef float v8 __attribute__((vector_size(AROUND * 4), may_alias));

/* The values at 0 <= u < 1 of the Lagrange polynomials of the nodes -2 to 3. */
INLINE v8 lagrange(float u) {
#define OVER_120(...) ((v8){__VA_ARGS__} / 120)
    const v8 c0 = {0, 0, 1}, c1 = OVER_120(6, -60, -40, 120, -30, 4), c2 = OVER_120(-5, 80, -150, 80, -5);
    const v8 c3 = OVER_120(-5, -5, 50, -70, 35, -5), c4 = OVER_120(5, -20, 30, -20, 5), c5 = OVER_120(-1, 5, -10, 10, -5, 1);
    return c0 + u * (c1 + u * (c2 + u * (c3 + u * (c4 + u * c5))));
}

/* The least score of a row that is not masked (-infinity), and the largest; NaN is left out. */
static void range_of(const float *x, int64_t n, float range[2]) {
    const vf most = (vf){0} + FLT_MAX;
    vf low = most, high = -most;
    for (int64_t j = 0; j < n; j += VL) {
        vf s = -most * 2;
        if (j + VL <= n) s = *(const vu *)(x + j);
        else memcpy(&s, x + j, (size_t)(n - j) * sizeof *x);
        low = minimum(choose(s >= -most, s, most), low), high = maximum(s, high);
    }
    range[0] = -highest(-low), range[1] = highest(high);
}

/* Find the first node of a row of n scores, the step from one to the next, and the counts [NODES]. */
static void nodes_of_row(const float *x, int64_t n, float *first, float *step, float *count) {
    v8 sums[INTERVALS + 1] = {0}; /* by interval, of the nodes around it; the last of masked scores */
    float range[2], u[VL] __attribute__((aligned(64)));
    int32_t at[VL] __attribute__((aligned(64)));
    range_of(x, n, range);
    const float length = fmaxf((range[1] - range[0]) / INTERVALS, FLT_EPSILON * (1 + fabsf(range[0])));
    const float low = range[0], by = 1 / length;
    for (int64_t j = 0; j < n; j += VL) {
        vf s = (vf){0} - INFINITY;
        if (j + VL <= n) s = *(const vu *)(x + j);
        else memcpy(&s, x + j, (size_t)(n - j) * sizeof *x);
        const vf place = minimum(maximum((s - low) * by, (vf){0}), (vf){0} + INTERVALS);
        const vi last = (vi){0} + (INTERVALS - 1), none = (vi){0} + INTERVALS;
        vi i = __builtin_convertvector(place, vi);
        i = (vi)choose(i > last, (vf)last, (vf)i);
        *(vf *)u = place - __builtin_convertvector(i, vf);
        *(vi *)at = (vi)choose(s >= -FLT_MAX, (vf)i, (vf)none);
        UNROLL for (int lane = 0; lane < VL; lane++) sums[at[lane]] += lagrange(u[lane]);
    }
    for (int g = 0; g < NODES; g++) {
        count[g] = 0;
        for (int i = 0; i < 6; i++)
            if (g - i >= 0 && g - i < INTERVALS) count[g] += sums[g - i][i];
    }
    *first = low - 2 * length, *step = length;
}

/* The same of contiguous rows; see nodes_of_row. */
typedef struct { const float *scores; int64_t rows, n, threads; float *first, *step, *counts; } Nodes;
int qkv_nodes(const Nodes *c) {
    #pragma omp parallel for num_threads((int)c->threads) if (c->threads > 1)
    for (int64_t r = 0; r < c->rows; r++)
        nodes_of_row(c->scores + r * c->n, c->n, c->first + r, c->step + r, c->counts + r * NODES);
    return 0;
}
