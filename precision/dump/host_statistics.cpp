// Norm, smallest and largest element, mean, and the share of zeros in one pass over memory; torch needs six.
//
// 64 lanes keep the adders busy whatever the width of the vector registers. A block is summed in float, blocks in
// double. Values that are not finite are only recognised, by the sum of squares: comparisons take them for granted.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LANES = 64;
constexpr int64_t BLOCK = 64 * LANES;
// Mean squares below this are added up in double: those of float lose digits there, or all of them.
constexpr double TINY = 1e-30;

// In the order of precision.monitor.statistics.OPS.
struct Figures {
    double norm, lowest, highest, mean, zeros, nans;
};

inline float widen(float value) { return value; }

inline float widen(uint16_t bfloat16) {
    uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// std::isfinite is constant under -ffinite-math-only
inline bool finite(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

template <typename Element>
inline __attribute__((always_inline)) double squares_in_double(const Element* values, int64_t count) {
    double products[LANES] = {}, squares = 0;
    int64_t start = 0;
    for (; start + LANES <= count; start += LANES) {
        for (int lane = 0; lane < LANES; ++lane) {
            double value = widen(values[start + lane]);
            products[lane] += value * value;
        }
    }
    for (; start < count; ++start) squares += static_cast<double>(widen(values[start])) * widen(values[start]);
    for (double product : products) squares += product;
    return squares;
}

// False, and no figures, where not all values are finite. Zero is what is closer to it than eps; 0 costs nothing.
template <bool count_zeros, typename Element>
inline __attribute__((always_inline)) bool measure(
    const Element* values, int64_t count, float eps, Figures* figures) {
    float highest[LANES], lowest[LANES];
    for (int lane = 0; lane < LANES; ++lane) highest[lane] = lowest[lane] = widen(values[0]);
    double sum = 0, squares = 0;
    int64_t start = 0, zeros = 0;
    for (; start + LANES <= count; start += BLOCK) {
        int64_t stop = start + BLOCK <= count ? start + BLOCK : start + (count - start) / LANES * LANES;
        float sums[LANES] = {}, products[LANES] = {};
        int32_t below[LANES] = {};
        for (int64_t row = start; row < stop; row += LANES) {
#pragma GCC unroll 1
            for (int lane = 0; lane < LANES; ++lane) {
                float value = widen(values[row + lane]);
                highest[lane] = value > highest[lane] ? value : highest[lane];
                lowest[lane] = value < lowest[lane] ? value : lowest[lane];
                sums[lane] += value;
                products[lane] += value * value;
                if (count_zeros) below[lane] += std::fabs(value) < eps;
            }
        }
        for (int lane = 0; lane < LANES; ++lane) sum += sums[lane], squares += products[lane], zeros += below[lane];
    }
    for (int64_t place = count / LANES * LANES; place < count; ++place) {
        float value = widen(values[place]);
        highest[0] = value > highest[0] ? value : highest[0];
        lowest[0] = value < lowest[0] ? value : lowest[0];
        sum += value;
        squares += static_cast<double>(value) * value;
        zeros += std::fabs(value) < eps;
    }
    for (int lane = 1; lane < LANES; ++lane) {
        highest[0] = highest[lane] > highest[0] ? highest[lane] : highest[0];
        lowest[0] = lowest[lane] < lowest[0] ? lowest[lane] : lowest[0];
    }
    if (!finite(squares) || squares < TINY * static_cast<double>(count)) {
        squares = squares_in_double(values, count);
        if (!finite(squares)) return false;
    }
    double size = static_cast<double>(count);
    *figures = {std::sqrt(squares), lowest[0], highest[0], sum / size, static_cast<double>(zeros) / size, 0};
    return true;
}

template <typename Element>
inline __attribute__((always_inline)) bool measure_either(
    const Element* values, int64_t count, float eps, Figures* figures) {
    return eps > 0 ? measure<true>(values, count, eps, figures) : measure<false>(values, count, eps, figures);
}

// One copy of the loop per width of the vector registers, and the widest that this CPU has at run time.
template <typename Element>
bool measure_plain(const Element* values, int64_t count, float eps, Figures* figures) {
    return measure_either(values, count, eps, figures);
}

#if defined(__x86_64__)
template <typename Element>
__attribute__((target("avx2,fma"))) bool measure_avx2(
    const Element* values, int64_t count, float eps, Figures* figures) {
    return measure_either(values, count, eps, figures);
}

template <typename Element>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))) bool measure_avx512(
    const Element* values, int64_t count, float eps, Figures* figures) {
    return measure_either(values, count, eps, figures);
}

template <typename Element>
bool measure_best(const Element* values, int64_t count, float eps, Figures* figures) {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return measure_avx512(values, count, eps, figures);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return measure_avx2(values, count, eps, figures);
    return measure_plain(values, count, eps, figures);
}
#else
template <typename Element>
bool measure_best(const Element* values, int64_t count, float eps, Figures* figures) {
    return measure_plain(values, count, eps, figures);
}
#endif

}  // namespace

extern "C" {

bool measure_float32(const float* values, int64_t count, float eps, Figures* figures) {
    return measure_best(values, count, eps, figures);
}

bool measure_bfloat16(const uint16_t* values, int64_t count, float eps, Figures* figures) {
    return measure_best(values, count, eps, figures);
}
}
