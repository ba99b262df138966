// How far apart two results are, block by block, in one pass over both; torch's kernels make seven, and copies.
//
// 64 lanes keep the adders busy whatever the width of the vector registers. A block is summed in float. For values that
// are not finite, or too large to be squared, only the sums say so; the caller must look at them.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 64;

struct Gap {
    double apart, size;  // sums of squares of the difference and of theirs
    double worst;        // largest norm of a block's difference over that of theirs and the floor
};

inline float widen(float value) { return value; }

inline float widen(uint16_t bfloat16) {
    uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename Ours, typename Theirs>
inline __attribute__((always_inline)) void sum_block(
    const Ours* ours, const Theirs* theirs, int64_t count, double* apart, double* size) {
    float gaps[LANES] = {}, squares[LANES] = {};
    int64_t whole = count / LANES * LANES;
    for (int64_t row = 0; row < whole; row += LANES) {
#pragma GCC unroll 1
        for (int lane = 0; lane < LANES; ++lane) {
            float value = widen(theirs[row + lane]);
            float gap = widen(ours[row + lane]) - value;
            gaps[lane] += gap * gap;
            squares[lane] += value * value;
        }
    }
    for (int64_t place = whole; place < count; ++place) {
        float value = widen(theirs[place]);
        float gap = widen(ours[place]) - value;
        gaps[place - whole] += gap * gap;
        squares[place - whole] += value * value;
    }
    *apart = *size = 0;
    for (int lane = 0; lane < LANES; ++lane) *apart += gaps[lane], *size += squares[lane];
}

template <typename Ours, typename Theirs>
inline __attribute__((always_inline)) void measure(
    const Ours* ours, const Theirs* theirs, int64_t count, int64_t block, double share, double tiny, Gap* result) {
    int64_t blocks = (count + block - 1) / block;
    std::vector<double> apart(blocks), size(blocks);
    *result = {0, 0, 0};
    for (int64_t number = 0; number < blocks; ++number) {
        int64_t start = number * block;
        int64_t length = start + block <= count ? block : count - start;
        sum_block(ours + start, theirs + start, length, &apart[number], &size[number]);
        result->apart += apart[number];
        result->size += size[number];
    }
    if (result->apart == 0) return;
    double floor = share * std::sqrt(result->size / static_cast<double>(blocks));
    floor = floor > tiny ? floor : tiny;
    for (int64_t number = 0; number < blocks; ++number) {
        double relative = std::sqrt(apart[number]) / (std::sqrt(size[number]) + floor);
        result->worst = relative > result->worst ? relative : result->worst;
    }
}

// One copy of the loop per width of the vector registers, and the widest that this CPU has at run time.
template <typename Ours, typename Theirs>
void measure_plain(const Ours* a, const Theirs* b, int64_t count, int64_t block, double share, double tiny, Gap* gap) {
    measure(a, b, count, block, share, tiny, gap);
}

#if defined(__x86_64__)
template <typename Ours, typename Theirs>
__attribute__((target("avx2,fma"))) void measure_avx2(
    const Ours* a, const Theirs* b, int64_t count, int64_t block, double share, double tiny, Gap* gap) {
    measure(a, b, count, block, share, tiny, gap);
}

template <typename Ours, typename Theirs>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))) void measure_avx512(
    const Ours* a, const Theirs* b, int64_t count, int64_t block, double share, double tiny, Gap* gap) {
    measure(a, b, count, block, share, tiny, gap);
}

template <typename Ours, typename Theirs>
void measure_best(const Ours* a, const Theirs* b, int64_t count, int64_t block, double share, double tiny, Gap* gap) {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return measure_avx512(a, b, count, block, share, tiny, gap);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return measure_avx2(a, b, count, block, share, tiny, gap);
    measure_plain(a, b, count, block, share, tiny, gap);
}
#else
template <typename Ours, typename Theirs>
void measure_best(const Ours* a, const Theirs* b, int64_t count, int64_t block, double share, double tiny, Gap* gap) {
    measure_plain(a, b, count, block, share, tiny, gap);
}
#endif

}  // namespace

extern "C" {

void distance_bfloat16_bfloat16(
    const uint16_t* ours, const uint16_t* theirs, int64_t count, int64_t block, double share, double tiny, Gap* gap) {
    measure_best(ours, theirs, count, block, share, tiny, gap);
}

void distance_bfloat16_float32(
    const uint16_t* ours, const float* theirs, int64_t count, int64_t block, double share, double tiny, Gap* gap) {
    measure_best(ours, theirs, count, block, share, tiny, gap);
}

void distance_float32_float32(
    const float* ours, const float* theirs, int64_t count, int64_t block, double share, double tiny, Gap* gap) {
    measure_best(ours, theirs, count, block, share, tiny, gap);
}
}
