/* Reductions of arrays that a call has written: small maps of its weights, and the largest eigenvalues of small matrices.
 * binding.py calls both functions; they return 0, or 1 if there is no memory. */

/* ---- Small maps ------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *weights; /* (count, nq, nk) */
    int64_t count, nq, nk, bin_q, bin_k;
    float *most, *mean;   /* (count, query bins, key bins): the largest weights, and means over the pairs that exist */
    int64_t threads;
} Pool;

int qkv_pool(const Pool *c) {
    const int64_t rows = (c->nq + c->bin_q - 1) / c->bin_q, cols = (c->nk + c->bin_k - 1) / c->bin_k;
    int failed = 0;
    #pragma omp parallel num_threads((int)c->threads) if (c->threads > 1) reduction(|:failed)
    {
        float *sums = malloc((size_t)c->nk * 2 * sizeof(float)), *most = sums + c->nk; /* of the columns of a row of bins */
        failed |= !sums;
        #pragma omp for
        for (int64_t bin = 0; bin < c->count * rows; bin++) {
            if (!sums) continue;
            const int64_t first = bin % rows * c->bin_q, n = min64(c->bin_q, c->nq - first);
            const float *w = c->weights + (bin / rows * c->nq + first) * c->nk;
            memcpy(sums, w, (size_t)c->nk * sizeof(float)), memcpy(most, w, (size_t)c->nk * sizeof(float));
            for (int64_t i = 1; i < n; i++)
                for (int64_t j = 0; j < c->nk; j++) {
                    const float x = w[i * c->nk + j];
                    sums[j] += x, most[j] = most[j] > x ? most[j] : x;
                }
            for (int64_t col = 0; col < cols; col++) {
                const int64_t start = col * c->bin_k, end = min64(start + c->bin_k, c->nk);
                double sum = 0;
                float top = most[start];
                for (int64_t j = start; j < end; j++) sum += sums[j], top = top > most[j] ? top : most[j];
                c->mean[bin * cols + col] = (float)(sum / (double)(n * (end - start)));
                c->most[bin * cols + col] = top;
            }
        }
        free(sums);
    }
    return failed;
}

/* ---- Eigenvalues ------------------------------------------------------------------------------------------------ */

enum { BITS = 26 }; /* of an eigenvalue as a share of the trace: more than its rounding errors leave right */
enum { MOST_EIGENVALUES = 4 };

typedef struct {
    const float *matrices; /* (count, n, n), symmetric and positive semidefinite */
    int64_t count, n, few;
    float *shares;         /* (count, few): the largest eigenvalues in descending order, divided by the sum of all */
    int64_t threads;
} Spectra;

/* Rows [r, r + count) of the products p of a symmetric matrix and v; the matrix is the rows of its lower triangle. */
INLINE void add_products(int count, const vf *a, int64_t r, const vf *v, vf *p) {
    const vf *row[4];
    vf sums[4] = {0};
    UNROLL for (int i = 0; i < count; i++) row[i] = a + (r + i) * (r + i + 1) / 2;
    for (int64_t j = 0; j < r; j++) {
        vf x = v[j], y = p[j];
        UNROLL for (int i = 0; i < count; i++) sums[i] += row[i][j] * x, y += row[i][j] * v[r + i];
        p[j] = y;
    }
    UNROLL for (int i = 0; i < count; i++) {
        for (int64_t j = r; j < r + i; j++) sums[i] += row[i][j] * v[j], p[j] += row[i][j] * v[r + i];
        p[r + i] = sums[i] + row[i][r + i] * v[r + i];
    }
}

/* Reduce VL matrices of trace 1, one in each lane, to tridiagonal form by reflections (Golub & Van Loan 2013, 8.3.1): its
 * diagonal, and the squares of the numbers beside it. A reflection of less than 1e-18 is left out. */
static void tridiagonal(vf *restrict a, int64_t n, vf *restrict diagonal, vf *restrict beside, vf *restrict p) {
    for (int64_t m = n - 1; m >= 0; m--) {
        vf *v = a + m * (m + 1) / 2, total = {0}, norm = {0}, factor, product = {0};
        diagonal[m] = v[m];
        for (int64_t j = 0; j < m; j++) total += v[j] * v[j];
        const vi none = total < 1e-36f;
        beside[m] = choose(none, (vf){0}, total);
        if (m < 2) continue;
        for (int i = 0; i < VL; i++) norm[i] = sqrtf(total[i]);
        factor = choose(none, (vf){0}, 1 / (norm * (norm + magnitude(v[m - 1]))));
        v[m - 1] += choose(v[m - 1] < 0, -norm, norm);
        int64_t r = 0;
        for (; r + 4 <= m; r += 4) add_products(4, a, r, v, p);
        for (; r < m; r++) add_products(1, a, r, v, p);
        for (int64_t j = 0; j < m; j++) p[j] *= factor, product += p[j] * v[j];
        product *= factor / 2;
        for (int64_t j = 0; j < m; j++) p[j] -= product * v[j];
        for (int64_t i = 0; i < m; i++) {
            vf *row = a + i * (i + 1) / 2, x = v[i], y = p[i];
            for (int64_t j = 0; j <= i; j++) row[j] -= x * p[j] + y * v[j];
        }
    }
}

/* Find the largest eigenvalues in [0, 1] by bisection; the signs of a Sturm sequence count those below a number. */
static void bisect(const vf *diagonal, const vf *beside, int64_t n, int64_t few, vf *low) {
    float width = 0.5f;
    memset(low, 0, (size_t)few * sizeof(vf));
    for (int bit = 0; bit < BITS; bit++, width /= 2) {
        vf at[MOST_EIGENVALUES], q[MOST_EIGENVALUES];
        vi below[MOST_EIGENVALUES] = {0};
        for (int64_t k = 0; k < few; k++) at[k] = low[k] + width, q[k] = (vf){0} + 1;
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < few; k++) {
                q[k] = diagonal[i] - at[k] - beside[i] / q[k];
                q[k] = choose(magnitude(q[k]) < 1e-30f, (vf){0} - 1e-30f, q[k]);
                below[k] -= q[k] < 0;
            }
        for (int64_t k = 0; k < few; k++) low[k] = choose(below[k] < (int32_t)(n - k), at[k], low[k]);
    }
}

int qkv_eigenvalues(const Spectra *c) {
    const int64_t n = c->n, triangle = n * (n + 1) / 2;
    int failed = 0;
    #pragma omp parallel num_threads((int)c->threads) if (c->threads > 1) reduction(|:failed)
    {
        vf *a = aligned_alloc(64, (size_t)up((triangle + 3 * n) * (int64_t)sizeof(vf), 64));
        vf *diagonal = a + triangle, *beside = diagonal + n, *p = beside + n, low[MOST_EIGENVALUES];
        failed |= !a;
        #pragma omp for
        for (int64_t first = 0; first < c->count; first += VL) {
            if (!a) continue;
            const int64_t lanes = min64(VL, c->count - first);
            int finite[VL];
            memset(a, 0, (size_t)triangle * sizeof(vf));
            for (int64_t lane = 0; lane < lanes; lane++) {
                const float *x = c->matrices + (first + lane) * n * n;
                double trace = 0;
                for (int64_t i = 0; i < n; i++) trace += x[i * n + i];
                const double scale = trace > 0 ? 1 / trace : 0;
                float *to = (float *)a + lane;
                finite[lane] = fabs(trace) <= DBL_MAX;
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = 0; j <= i; j++, to += VL) *to = (float)(x[i * n + j] * scale);
            }
            tridiagonal(a, n, diagonal, beside, p);
            bisect(diagonal, beside, n, c->few, low);
            for (int64_t lane = 0; lane < lanes; lane++)
                for (int64_t k = 0; k < c->few; k++) c->shares[(first + lane) * c->few + k] = finite[lane] ? low[k][lane] : NAN;
        }
        free(a);
    }
    return failed;
}
