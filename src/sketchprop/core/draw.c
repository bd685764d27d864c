/* Draws on a CPU: what core/probabilities.py and core/sampling.py say, in one call each.
 *
 * At small batches a draw is some thirty operations on a few hundred numbers, each of which costs
 * more to call than to compute. Plain C, without torch's headers: one library for all versions.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>

static const double TINY = DBL_MIN;

/* root_i to p_i in place, for one set. The level falls until all roots at or above it have been
 * counted as sure; every round of the loop takes at least one more. */
static void fill_set(double *p, int64_t n, double rank)
{
    double level = INFINITY;
    int64_t sure = -1;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(p[i]) || isnan(rank)) {
            for (int64_t j = 0; j < n; j++) p[j] = NAN;
            return;
        }
        if (p[i] < TINY) p[i] = TINY;
    }
    for (;;) {
        double sums[4] = {0, 0, 0, 0};
        int64_t counts[4] = {0, 0, 0, 0};
        for (int64_t i = 0; i < n; i++) {
            int above = p[i] >= level;
            sums[i & 3] += above ? 0 : p[i];
            counts[i & 3] += above;
        }
        double rest = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        int64_t count = counts[0] + counts[1] + counts[2] + counts[3];
        if (count == sure || (count >= rank && sure >= 0)) break;
        sure = count;
        level = count < rank ? rest / (rank - count) : count ? NAN : INFINITY;
    }
    double least = pow(TINY, 0.75);
    for (int64_t i = 0; i < n; i++) {
        double share = isinf(p[i]) ? 1 + 0 * level : p[i] / level;
        p[i] = share > 1 ? 1 : share < least ? 0 : share;
    }
}

void sketchprop_fill(double *p, int64_t sets, int64_t n, double rank)
{
    for (int64_t s = 0; s < sets; s++) fill_set(p + s * n, n, rank);
}

/* As capped_fill: p holds the roots of N samples of T rows and becomes their probabilities;
 * room: N * (T + 1) numbers. */
void sketchprop_capped_fill(double *p, double *room, int64_t N, int64_t T, double rank, double most)
{
    double *whole = room, *share = room + N * T;
    for (int64_t i = 0; i < N * T; i++) whole[i] = p[i];
    fill_set(whole, N * T, rank);
    for (int64_t s = 0; s < N; s++) {
        share[s] = 0;
        for (int64_t t = 0; t < T; t++) share[s] += whole[s * T + t];
    }
    fill_set(share, N, rank / most);
    for (int64_t s = 0; s < N; s++) fill_set(p + s * T, T, most * share[s]);
}

/* As systematic: index[sets, rank], and scale = 1/p of each. */
void sketchprop_systematic(
    const double *p, const double *u, int64_t sets, int64_t n, int64_t rank, int64_t *index, double *scale)
{
    double grid = 1;
    while (grid <= rank) grid *= 2;
    for (int64_t s = 0; s < sets; s++, p += n, index += rank, scale += rank) {
        double total = 0, sum = 0;
        for (int64_t i = 0; i < n; i++) total += (p[i] + grid) - grid;
        double excess = total - rank;
        double high = (excess < 0 ? excess : 0) + (1 - grid * DBL_EPSILON);
        double start = u[s] < excess ? excess : u[s];
        start = start > high ? high : start;
        int64_t i = -1;
        for (int64_t r = 0; r < rank; r++) {
            double point = ((grid + r) + start) - grid;
            while (i < n - 1 && !(i >= 0 && sum > point)) {
                i++;
                sum += (p[i] + grid) - grid;
            }
            index[r] = i;
            scale[r] = 1 / p[i];
        }
    }
}
