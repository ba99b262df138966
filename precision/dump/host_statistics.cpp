// Largest and smallest element, sum and sum of squares of finite values in one pass over memory; torch needs four.
//
// 64 lanes keep the adders busy whatever the width of the vector registers. A block is summed in float, blocks in
// double. For values that are not finite only the sum of squares says so; the caller must look at it.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LANES = 64;
constexpr int64_t BLOCK = 64 * LANES;

struct Figures {
    double highest, lowest, sum, squares;
};

inline float widen(float value) { return value; }

inline float widen(uint16_t bfloat16) {
    uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename Element>
inline __attribute__((always_inline)) void measure(const Element* values, int64_t count, Figures* figures) {
    float highest[LANES], lowest[LANES];
    for (int lane = 0; lane < LANES; ++lane) highest[lane] = lowest[lane] = widen(values[0]);
    double sum = 0, squares = 0;
    int64_t start = 0;
    for (; start + LANES <= count; start += BLOCK) {
        int64_t stop = start + BLOCK <= count ? start + BLOCK : start + (count - start) / LANES * LANES;
        float sums[LANES] = {}, products[LANES] = {};
        for (int64_t row = start; row < stop; row += LANES) {
#pragma GCC unroll 1
            for (int lane = 0; lane < LANES; ++lane) {
                float value = widen(values[row + lane]);
                highest[lane] = value > highest[lane] ? value : highest[lane];
                lowest[lane] = value < lowest[lane] ? value : lowest[lane];
                sums[lane] += value;
                products[lane] += value * value;
            }
        }
        for (int lane = 0; lane < LANES; ++lane) sum += sums[lane], squares += products[lane];
    }
    for (int64_t place = count / LANES * LANES; place < count; ++place) {
        float value = widen(values[place]);
        highest[0] = value > highest[0] ? value : highest[0];
        lowest[0] = value < lowest[0] ? value : lowest[0];
        sum += value;
        squares += static_cast<double>(value) * value;
    }
    for (int lane = 1; lane < LANES; ++lane) {
        highest[0] = highest[lane] > highest[0] ? highest[lane] : highest[0];
        lowest[0] = lowest[lane] < lowest[0] ? lowest[lane] : lowest[0];
    }
    *figures = {highest[0], lowest[0], sum, squares};
}

// One copy of the loop per width of the vector registers, and the widest that this CPU has at run time.
template <typename Element>
void measure_plain(const Element* values, int64_t count, Figures* figures) {
    measure(values, count, figures);
}

#if defined(__x86_64__)
template <typename Element>
__attribute__((target("avx2,fma"))) void measure_avx2(const Element* values, int64_t count, Figures* figures) {
    measure(values, count, figures);
}

template <typename Element>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))) void measure_avx512(
    const Element* values, int64_t count, Figures* figures) {
    measure(values, count, figures);
}

template <typename Element>
void measure_best(const Element* values, int64_t count, Figures* figures) {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return measure_avx512(values, count, figures);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return measure_avx2(values, count, figures);
    measure_plain(values, count, figures);
}
#else
template <typename Element>
void measure_best(const Element* values, int64_t count, Figures* figures) {
    measure_plain(values, count, figures);
}
#endif

}  // namespace

extern "C" {

void measure_float32(const float* values, int64_t count, Figures* figures) { measure_best(values, count, figures); }

void measure_bfloat16(const uint16_t* values, int64_t count, Figures* figures) {
    measure_best(values, count, figures);
}
}
