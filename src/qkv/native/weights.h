/* From scores to weights: the functions of the normalizers, and their derivatives.
 *
 * Scores are in base 2, and t is the difference of a score from the offset of its row: of a softmax a running maximum or the
 * log-sum-exp, of entmax the level, of a weight that depends on its own score alone minus what is added to that (`shift`).
 * That of softpick needs the score itself: `picked`.
 * The score of a masked pair is LOWEST, which gives the weight 0 and the derivative 0.
 */
enum { SOFTMAX, SIGMOID, RELU, ELU_PLUS_ONE, IDENTITY, SPARSEMAX, ENTMAX_15, ENTMAX, SOFTPICK, NORMALIZERS };

static const float LOWEST = -1e30f; /* score of a masked pair: its weight is 0, and 0 times it is 0 */

/* 2^t for t <= 127, within 1.5 ulp; 0 below -126.5; NaN for NaN. */
INLINE vf exp2_of(vf t) {
    const float magic = 12582912 + 127; /* 1.5 * 2^23 + 127: the sum holds round(t) + 127 in its lowest bits */
    vf u = t + magic, f = t - (u - magic);
    vf y = f * 0x1.5bbb52p-10f + 0x1.3ced1p-7f;
    y = y * f + 0x1.c6b74ep-5f;
    y = y * f + 0x1.ebf9bcp-3f;
    y = y * f + 0x1.62e436p-1f;
    y = y * f + 1.0f;
    return y * (vf)((vi)u << 23);
}

/* log2 of positive normal numbers, within 1e-7 or 2 ulp; of others large or NaN. The polynomial is that of Cephes (Moshier). */
INLINE vf log2_of(vf x) {
    const vi exponent = ((vi)x - 0x3f3504f3) >> 23; /* the rest is between sqrt(1/2) and sqrt(2) */
    const vf z = (vf)((vi)x - (exponent << 23)) - 1;
    vf y = z * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * z + 1.1676998740e-1f;
    y = y * z - 1.2420140846e-1f;
    y = y * z + 1.4249322787e-1f;
    y = y * z - 1.6668057665e-1f;
    y = y * z + 2.0000714765e-1f;
    y = y * z - 2.4999993993e-1f;
    y = y * z + 3.3333331174e-1f;
    y = z + (y * z - 0.5f) * (z * z);
    return __builtin_convertvector(exponent, vf) + y * (float)M_LOG2E;
}

/* The weight of t, and its derivative in the natural score at a fixed offset. `power` is that of entmax, 1 / (alpha - 1). */
INLINE vf weight_of(int kind, vf t, float power, vf *derivative) {
    const vf zero = {0}, one = zero + 1, floor = zero - 127;
    const float ln2 = (float)M_LN2;
    vf w;
    if (kind == SOFTMAX) *derivative = w = exp2_of(maximum(floor, t));
    else if (kind == SIGMOID) {
        const vf e = exp2_of(maximum(floor, minimum(zero + 120, t))), rest = 1 / (1 + e); /* 1 - w, which would cancel */
        w = e * rest, *derivative = w * rest;
    } else if (kind == ELU_PLUS_ONE) {
        w = exp2_of(maximum(floor, minimum(zero, t)));
        *derivative = w, w += maximum(zero, t) * ln2;
    } else if (kind == RELU) w = maximum(zero, t) * ln2, *derivative = choose(w > 0, one, zero);
    else if (kind == IDENTITY) {
        const vi visible = t > LOWEST / 2;
        w = choose(visible, t * ln2, zero), *derivative = choose(visible, one, zero);
        w = choose(t != t, t, w);
    } else { /* x^power, and its derivative over power, x^(power - 1) */
        const vf x = maximum(zero, t) * (ln2 / power);
        if (kind == ENTMAX_15) *derivative = x;
        else if (kind == SPARSEMAX) *derivative = choose(x > 0, one, zero);
        else {
            const vf log2 = log2_of(maximum(zero + FLT_MIN, x));
            *derivative = choose(x > 0, exp2_of(maximum(floor, log2 * (power - 1))), zero);
        }
        w = x * *derivative;
    }
    return w;
}

/* |e^s - 1| over e^level, s and level in base 2, which is that of a softpick's sum; 0 for a masked pair. The weight is that of
 * s > 0, and 0 of others. 1 - 2^-|s| near 0 is a polynomial, as the difference would lose digits. */
INLINE vf picked(vf s, vf level) {
    const vf zero = {0}, floor = zero - 127, a = magnitude(s), z = a * (float)M_LN2;
    vf small = 1 - z * (1.0f / 7);
    small = 1 - z * small * (1.0f / 6), small = 1 - z * small * (1.0f / 5), small = 1 - z * small * (1.0f / 4);
    small = z * (1 - z * (1 - z * small * (1.0f / 3)) * 0.5f);
    const vf unit = choose(a < 0.5f, small, 1 - exp2_of(maximum(floor, -a)));
    const vf w = exp2_of(maximum(floor, maximum(zero, s) - level)) * unit;
    return choose(s != s, s, choose(s > LOWEST / 2, w, zero));
}

/* The logarithm to base 2 of a weight, by its t if that is it; 0 times that of 0 is 0, and that of a negative one NaN. */
INLINE vf log_of_weight(int kind, vf t, vf w) {
    if (kind == SOFTMAX) return maximum((vf){0} - 127, t);
    const vf log2 = log2_of(maximum((vf){0} + FLT_MIN, w));
    return kind == IDENTITY ? choose(w < 0, (vf){0} + NAN, log2) : log2;
}

/* cap * tanh(x / cap). Near 0 it is a polynomial, as 1 - 2 / (e + 1) would lose digits. */
INLINE vf capped(vf x, float cap) {
    const vf z = x / cap, square = z * z, limit = (vf){0} + 15;
    const vf e = exp2_of(maximum(-limit, -maximum(-limit, -z)) * (2 * (float)M_LOG2E));
    vf small = square * 0x1.664f48p-6f - 0x1.ba1ba2p-5f; /* 62/2835, 17/315, 2/15, 1/3 */
    small = ((small * square + 0x1.111112p-3f) * square - 0x1.555556p-2f) * square + 1;
    return cap * choose(magnitude(z) < 0.3f, z * small, (e - 1) / (e + 1));
}

/* Logarithms to base 2 of the sigmoid of x and of elu(x) + 1, which do not underflow; and their derivatives. */
INLINE vf log_sigmoid(vf x, vf *derivative) {
    const vf zero = {0}, e = exp2_of(maximum(zero - 127, -magnitude(x)));
    *derivative = choose(x > 0, e, zero + 1) / (1 + e);
    return minimum(zero, x) - log2_of(1 + e);
}
INLINE vf log_elu_plus_one(vf x, vf *derivative) {
    const vf zero = {0}, above = 1 + maximum(zero, x) * (float)M_LN2;
    *derivative = 1 / above;
    return minimum(zero, x) + log2_of(above);
}
