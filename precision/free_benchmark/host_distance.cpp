// How far apart two results are, block by block, in one pass over both; torch's kernels make seven, and copies.
//
// 64 lanes keep the adders busy whatever the width of the vector registers. A block is summed in float; only if a sum
// says that a value is not finite, a mask's filler, or too large to be squared, it is gone through again element by
// element. What is no number is told by its bits: the compiler may take values for finite.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 64;
constexpr int64_t DOUBLES = 16;

struct Rules {
    int64_t block;       // elements of a block
    double floor, tiny;  // what is added to a block's norm: this share of the mean block's, or at least tiny
    float huge;          // what is larger is as good as infinite
};

struct Gap {
    double apart, size;  // sums of squares of the difference and of theirs
    double worst;        // largest norm of a block's difference over that of theirs and the floor
    double alike;        // 0 where only one side is a number, or they are infinite in different ways; then no more is known
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

inline bool is_finite(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7ff0000000000000) != 0x7ff0000000000000;
}

// 0 for numbers, 1 and 2 for what is as good as infinite, by sign, 3 for NaN.
inline int32_t kind_of(float value, uint32_t huge) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t magnitude = bits & 0x7fffffff;
    int32_t kind = magnitude > huge ? 1 + static_cast<int32_t>(bits >> 31) : 0;
    return magnitude > 0x7f800000 ? 3 : kind;
}

template <typename Ours, typename Theirs>
inline __attribute__((always_inline)) bool sum_numbers(
    const Ours* ours, const Theirs* theirs, int64_t count, uint32_t huge, double* apart, double* size) {
    double gaps[DOUBLES] = {}, squares[DOUBLES] = {};
    int32_t unlike[DOUBLES] = {};
    for (int64_t row = 0; row < count; row += DOUBLES) {
        int64_t width = row + DOUBLES <= count ? DOUBLES : count - row;
#pragma GCC unroll 1
        for (int64_t lane = 0; lane < width; ++lane) {
            float one = widen(ours[row + lane]), other = widen(theirs[row + lane]);
            int32_t kind = kind_of(one, huge), other_kind = kind_of(other, huge);
            unlike[lane] |= kind ^ other_kind;
            double value = other_kind == 0 ? other : 0.0f;
            double gap = (kind | other_kind) == 0 ? static_cast<double>(one) - static_cast<double>(other) : 0.0;
            gaps[lane] += gap * gap;
            squares[lane] += value * value;
        }
    }
    *apart = *size = 0;
    int32_t any = 0;
    for (int lane = 0; lane < DOUBLES; ++lane) *apart += gaps[lane], *size += squares[lane], any |= unlike[lane];
    return any == 0;
}

template <typename Ours, typename Theirs>
inline __attribute__((always_inline)) void measure(
    const Ours* ours, const Theirs* theirs, int64_t count, const Rules& rules, Gap* result) {
    int64_t block = rules.block, blocks = (count + block - 1) / block;
    std::vector<double> apart(blocks), size(blocks);
    uint32_t huge;
    std::memcpy(&huge, &rules.huge, sizeof huge);
    *result = {0, 0, 0, 1};
    for (int64_t number = 0; number < blocks; ++number) {
        int64_t start = number * block;
        int64_t length = start + block <= count ? block : count - start;
        sum_block(ours + start, theirs + start, length, &apart[number], &size[number]);
        if (!is_finite(apart[number] + size[number]) &&
            !sum_numbers(ours + start, theirs + start, length, huge, &apart[number], &size[number])) {
            result->alike = 0;
            return;
        }
        result->apart += apart[number];
        result->size += size[number];
    }
    if (result->apart == 0) return;
    double floor = rules.floor * std::sqrt(result->size / static_cast<double>(blocks));
    floor = floor > rules.tiny ? floor : rules.tiny;
    for (int64_t number = 0; number < blocks; ++number) {
        double relative = std::sqrt(apart[number]) / (std::sqrt(size[number]) + floor);
        result->worst = relative > result->worst ? relative : result->worst;
    }
}

// One copy of the loop per width of the vector registers, and the widest that this CPU has at run time.
template <typename Ours, typename Theirs>
void measure_plain(const Ours* a, const Theirs* b, int64_t count, const Rules& rules, Gap* gap) {
    measure(a, b, count, rules, gap);
}

#if defined(__x86_64__)
template <typename Ours, typename Theirs>
__attribute__((target("avx2,fma"))) void measure_avx2(
    const Ours* a, const Theirs* b, int64_t count, const Rules& rules, Gap* gap) {
    measure(a, b, count, rules, gap);
}

template <typename Ours, typename Theirs>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))) void measure_avx512(
    const Ours* a, const Theirs* b, int64_t count, const Rules& rules, Gap* gap) {
    measure(a, b, count, rules, gap);
}

template <typename Ours, typename Theirs>
void measure_best(const Ours* a, const Theirs* b, int64_t count, const Rules& rules, Gap* gap) {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return measure_avx512(a, b, count, rules, gap);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return measure_avx2(a, b, count, rules, gap);
    measure_plain(a, b, count, rules, gap);
}
#else
template <typename Ours, typename Theirs>
void measure_best(const Ours* a, const Theirs* b, int64_t count, const Rules& rules, Gap* gap) {
    measure_plain(a, b, count, rules, gap);
}
#endif

}  // namespace

extern "C" {

void distance_bfloat16_bfloat16(
    const uint16_t* ours, const uint16_t* theirs, int64_t count, const Rules* rules, Gap* gap) {
    measure_best(ours, theirs, count, *rules, gap);
}

void distance_bfloat16_float32(
    const uint16_t* ours, const float* theirs, int64_t count, const Rules* rules, Gap* gap) {
    measure_best(ours, theirs, count, *rules, gap);
}

void distance_float32_float32(
    const float* ours, const float* theirs, int64_t count, const Rules* rules, Gap* gap) {
    measure_best(ours, theirs, count, *rules, gap);
}
}
