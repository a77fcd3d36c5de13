// What a translated kernel (ptx.py) runs on: PTX's types and arithmetic, the memory of a launch, and its threads.
//
// A block's threads are fibers of one thread of the host. Each runs until it has to wait: at a barrier, or where a warp does something together (a
// shuffle, a vote, an mma), until the others have come. Blocks run one after the other; those of a cooperative launch all at once. So a result is the
// same in every run, and what depends on timing, on the memory model's weakness or on a race shows only in so far as it depends on this order, which
// STAND_IN_ORDER=reversed turns around.
//
// Every address is the host's. Shared memory lies below 4 GiB, where its 32-bit addresses are pointers, too. Each access is held against what the
// launch may touch: the tensors' memory, the kernel's parameters and variables, its shared and local memory; and against its alignment. A byte of
// shared memory that no thread has written is not read, and what cp.async copies is there once its thread has waited for it, not before; what
// cp.async.bulk copies, once a thread waits for its mbarrier and the others have had their turn. With STAND_IN_UNWRITTEN=nan all shared memory is written
// at first, with NaN: for kernels that read more of a stage than was copied there, and use none of it.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>
#include <map>
#include <type_traits>
#include <vector>

// ---- types ---------------------------------------------------------------------------------------------------------------------------------

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

enum : unsigned { RN = 0, RZ = 1, RM = 2, RP = 4, INT = 8, FTZ = 16, SAT = 32, NAN_WINS = 64, WRAP = 128, FINITE = 256, RELU = 512 };

template <class To, class From>
To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

/// A float of E bits of exponent and M of mantissa. The largest exponent is of infinity and NaN, but in e4m3, where 0x7f alone is NaN.
template <class Bits, int E, int M>
struct Narrow {
  static constexpr int kBias = (1 << (E - 1)) - 1;
  static constexpr bool kFinite = E == 4;
  static constexpr unsigned kNan = (1u << (E + M)) - 1, kInf = kFinite ? kNan : ((1u << E) - 1) << M;
  Bits raw;

  Narrow() = default;
  explicit Narrow(double x, unsigned flags = RN) {
    const double size = std::fabs(x);
    unsigned found = kNan;
    if (!std::isnan(x)) {
      const int exponent = size > 0 ? std::max(std::min(std::ilogb(size), 1000), 1 - kBias) : 1 - kBias;
      const double scaled = std::isinf(size) ? size : std::ldexp(size, M - exponent);
      const double rounded = flags & RZ ? std::trunc(scaled) : std::nearbyint(scaled);
      const double all = std::isinf(size) ? 1e9 : std::ldexp(exponent + kBias - 1, M) + rounded;
      found = all < kInf ? static_cast<unsigned>(all) : flags & FINITE || (flags & RZ && !std::isinf(size)) ? kInf - 1 : kInf;
      if (flags & RELU && std::signbit(x)) found = 0;
    }
    raw = static_cast<Bits>(found | (std::isnan(x) ? 0u : (std::signbit(x) && !(flags & RELU) ? 1u : 0u) << (E + M)));
  }
  operator double() const {
    const unsigned size = raw & kNan;
    const double sign = raw >> (E + M) ? -1 : 1;
    if (kFinite ? size == kNan : size > kInf) return std::numeric_limits<double>::quiet_NaN();
    if (!kFinite && size == kInf) return sign * INFINITY;
    const unsigned exponent = size >> M, mantissa = size & ((1u << M) - 1);
    return sign * (exponent ? std::ldexp(mantissa + (1u << M), static_cast<int>(exponent) - kBias - M) : std::ldexp(mantissa, 1 - kBias - M));
  }
};
using f16 = Narrow<u16, 5, 10>;
using bf16 = Narrow<u16, 8, 7>;
using e4m3 = Narrow<u8, 4, 3>;
using e5m2 = Narrow<u8, 5, 2>;

template <class H>
struct Pair {
  H low, high;
};
using f16x2 = Pair<f16>;
using bf16x2 = Pair<bf16>;
using e4m3x2 = Pair<e4m3>;
using e5m2x2 = Pair<e5m2>;

template <class T>
constexpr bool is_pair = false;
template <class H>
constexpr bool is_pair<Pair<H>> = true;
template <class T>
constexpr bool is_float = std::is_floating_point_v<T> || std::is_same_v<T, f16> || std::is_same_v<T, bf16> || std::is_same_v<T, e4m3> || std::is_same_v<T, e5m2>;
template <class T>
using Wide = std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 4, s64, s32>, std::conditional_t<sizeof(T) == 4, u64, u32>>;

/// A register read as T: its low bits.
template <class T, class R>
T as(const R& r) {
  static_assert(sizeof(T) <= sizeof(R));
  T value;
  memcpy(&value, &r, sizeof value);
  return value;
}
template <class T>
T literal(u64 value) {
  return as<T>(value);
}
/// A value into a register, extended by its sign if it has one.
template <class R, class V>
void put(R& r, const V& value) {
  if constexpr (sizeof(R) == sizeof(V)) {
    memcpy(&r, &value, sizeof r);
  } else {
    static_assert(std::is_integral_v<V> && sizeof(V) < sizeof(R));
    r = bits<R>(static_cast<std::conditional_t<sizeof(R) == 2, u16, std::conditional_t<sizeof(R) == 4, u32, u64>>>(value));
  }
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------------------------------

template <unsigned F, class T>
T flushed(T x) {
  if constexpr (F & FTZ && std::is_same_v<T, f32>) return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
  return x;
}

/// op(a...), rounded as F says; of narrow floats by way of double, of pairs for each half.
template <class T, unsigned F, class Op, class... A>
T compute(const Op& op, A... a) {
  if constexpr (is_pair<T>) {
    return {compute<decltype(T::low), F>(op, a.low...), compute<decltype(T::high), F>(op, a.high...)};
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(op(a...));
  } else if constexpr (!std::is_floating_point_v<T>) {
    const double found = op(static_cast<double>(a)...);
    return T(F & SAT ? found > 0 ? std::min(found, 1.0) : 0.0 : found, F);
  } else {
    T found;
    if constexpr (F & (RZ | RM | RP)) {
      std::fesetround(F & RZ ? FE_TOWARDZERO : F & RM ? FE_DOWNWARD : FE_UPWARD);
      volatile T rounded = [&](volatile A... late) { return op(static_cast<T>(late)...); }(flushed<F>(a)...);
      std::fesetround(FE_TONEAREST);
      found = rounded;
    } else {
      found = op(flushed<F>(a)...);
    }
    found = flushed<F>(found);
    return F & SAT ? found > 0 ? std::min(found, T(1)) : T(0) : found;
  }
}

#define UNARY(name, ...)                                    \
  template <class T, unsigned F>                                   \
  T name##_(T x) {                                                 \
    return compute<T, F>([](auto a) { return __VA_ARGS__; }, x);    \
  }
#define BINARY(name, ...)                                        \
  template <class T, unsigned F>                                        \
  T name##_(T x, T y) {                                                 \
    return compute<T, F>([](auto a, auto b) { return __VA_ARGS__; }, x, y); \
  }
UNARY(neg, -a)
UNARY(not, std::is_same_v<decltype(a), bool> ? !a : ~a)
UNARY(sqrt, std::sqrt(a))
UNARY(rsqrt, 1 / std::sqrt(static_cast<double>(a)))
UNARY(rcp, 1 / a)
UNARY(ex2, std::exp2(a))
UNARY(lg2, std::log2(a))
UNARY(sin, std::sin(a))
UNARY(cos, std::cos(a))
UNARY(tanh, std::tanh(a))
UNARY(abs, a < 0 || (is_float<decltype(a)> && std::signbit(static_cast<double>(a))) ? -a : a)
BINARY(and, a & b)
BINARY(or, a | b)
BINARY(xor, a ^ b)
BINARY(copysign, std::copysign(b, a))  // the sign is the first one's
BINARY(rem, b == 0 ? a : b + 1 == 0 && std::is_signed_v<decltype(b)> ? 0 : a % b)
#undef UNARY
#undef BINARY

template <class T, unsigned F, class Op>
T clamped(const Op& op, T x, T y) {
  if constexpr (std::is_integral_v<T> && (F & SAT)) {
    const auto whole = op(static_cast<s64>(x), static_cast<s64>(y));
    return static_cast<T>(std::clamp<s64>(whole, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
  }
  return compute<T, F>(op, x, y);
}
template <class T, unsigned F>
T add_(T x, T y) {
  return clamped<T, F>([](auto a, auto b) { return a + b; }, x, y);
}
template <class T, unsigned F>
T sub_(T x, T y) {
  return clamped<T, F>([](auto a, auto b) { return a - b; }, x, y);
}
template <class T, unsigned F>
T mul_(T x, T y) {
  return compute<T, F>([](auto a, auto b) -> decltype(a) {
    if constexpr (sizeof a == 2 && std::is_integral_v<decltype(a)>) return static_cast<decltype(a)>(static_cast<u32>(a) * static_cast<u32>(b));
    return a * b;
  }, x, y);
}
template <class T, unsigned F>
T div_(T x, T y) {
  return compute<T, F>([](auto a, auto b) -> decltype(a) {
    if constexpr (std::is_integral_v<decltype(a)>) return b == 0 ? static_cast<decltype(a)>(-1) : b + 1 == 0 && std::is_signed_v<T> ? -a : a / b;
    else return a / b;
  }, x, y);
}
template <class T, unsigned F>
T fma_(T x, T y, T z) {
  return compute<T, F>([](auto a, auto b, auto c) { return std::fma(a, b, c); }, x, y, z);
}
template <class T, unsigned F>
T mad_(T x, T y, T z) {
  if constexpr (is_float<T>) return fma_<T, F>(x, y, z);
  else return add_<T, F>(mul_<T, 0>(x, y), z);
}
template <class T, unsigned F>
Wide<T> mul_wide_(T x, T y) {
  return static_cast<Wide<T>>(x) * static_cast<Wide<T>>(y);
}
template <class T, unsigned F>
Wide<T> mad_wide_(T x, T y, Wide<T> z) {
  return mul_wide_<T, F>(x, y) + z;
}
template <class T, unsigned F>
T mul_hi_(T x, T y) {
  if constexpr (sizeof(T) == 8) return static_cast<T>(static_cast<std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>(x) * y >> 64);
  else return static_cast<T>(mul_wide_<T, 0>(x, y) >> 8 * sizeof(T));
}
template <class T, unsigned F>
T mad_hi_(T x, T y, T z) {
  return add_<T, 0>(mul_hi_<T, 0>(x, y), z);
}
template <bool kLess, class T, unsigned F>
T extreme(T x, T y) {
  return compute<T, F & ~NAN_WINS>([](auto a, auto b) -> decltype(a) {
    if constexpr (std::is_floating_point_v<decltype(a)>) {
      if (std::isnan(a) || std::isnan(b)) return F & NAN_WINS ? a + b : std::isnan(a) ? b : a;
      if (a == b) return std::signbit(a) == kLess ? a : b;
    }
    return (a < b) == kLess ? a : b;
  }, x, y);
}
template <class T, unsigned F>
T min_(T x, T y) {
  return extreme<true, T, F>(x, y);
}
template <class T, unsigned F>
T max_(T x, T y) {
  return extreme<false, T, F>(x, y);
}
template <class T, unsigned F>
T shl_(T x, u32 by) {
  return by < 8 * sizeof(T) ? static_cast<T>(static_cast<u64>(x) << by) : T(0);
}
template <class T, unsigned F>
T shr_(T x, u32 by) {
  return static_cast<T>(x >> (by < 8 * sizeof(T) ? by : 8 * sizeof(T) - 1)) & (by < 8 * sizeof(T) || std::is_signed_v<T> ? T(-1) : T(0));
}
template <class T, unsigned F>
T shf_l_(T low, T high, u32 by) {
  const u32 n = F & WRAP ? by & 31 : std::min(by, 32u);
  return static_cast<T>(((static_cast<u64>(high) << 32 | low) << n) >> 32);
}
template <class T, unsigned F>
T shf_r_(T low, T high, u32 by) {
  return static_cast<T>((static_cast<u64>(high) << 32 | low) >> (F & WRAP ? by & 31 : std::min(by, 32u)));
}
template <class T, unsigned F>
u32 popc_(T x) {
  return static_cast<u32>(__builtin_popcountll(x));
}
template <class T, unsigned F>
u32 clz_(T x) {
  return x ? static_cast<u32>(__builtin_clzll(x)) - (64 - 8 * sizeof(T)) : 8 * sizeof(T);
}
template <class T, unsigned F>
u32 bfind_shiftamt_(T x) {  // from the highest bit to the first that is not the sign's
  const u64 other = x < T(0) ? ~x : x;
  return other ? static_cast<u32>(__builtin_clzll(other)) - (64 - 8 * sizeof(T)) : ~0u;
}
template <class T, unsigned F>
u32 bfind_(T x) {
  const u32 shift = bfind_shiftamt_<T, F>(x);
  return shift == ~0u ? shift : 8 * sizeof(T) - 1 - shift;
}
template <class T, unsigned F>
T brev_(T x) {
  T out = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) out |= (x >> i & 1) << (8 * sizeof(T) - 1 - i);
  return out;
}
template <class T, unsigned F>
T bfe_(T x, u32 position, u32 length) {
  const int p = position & 255, n = length & 255, last = 8 * sizeof(T) - 1;
  const bool sign = std::is_signed_v<T> && n && x >> std::min(p + n - 1, last) & 1;
  T out = 0;
  for (int i = 0; i <= last; ++i) out |= static_cast<T>(i < n && p + i <= last ? x >> (p + i) & 1 : sign) << i;
  return out;
}
template <class T, unsigned F>
T bfi_(T what, T into, u32 position, u32 length) {
  const unsigned p = position & 255, n = length & 255;
  for (unsigned i = 0; i < n && p + i < 8 * sizeof(T); ++i) into = (into & ~(T(1) << (p + i))) | (what >> i & 1) << (p + i);
  return into;
}
template <class T, unsigned F>
T prmt_(T a, T b, T which) {
  const u64 all = static_cast<u64>(b) << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 pick = which >> 4 * i & 15, byte = all >> 8 * (pick & 7) & 255;
    out |= (pick & 8 ? byte & 128 ? 255u : 0u : byte) << 8 * i;
  }
  return out;
}
template <class T, unsigned F>
T lop3_(T a, T b, T c, u32 table) {
  T out = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return out;
}
template <class T, unsigned F>
T selp_(T yes, T no, bool which) {
  return which ? yes : no;
}
template <class A, class B>
s32 dp4a_(u32 x, u32 y, s32 sum) {
  for (int i = 0; i < 4; ++i) sum += static_cast<A>(x >> 8 * i) * static_cast<B>(y >> 8 * i);
  return sum;
}

/// Comparisons: the ordered ones of floats are false for a NaN, those that end in u (and ne's unordered kin) true.
enum Comparison { EQ, NE, LT, LE, GT, GE, LO, LS, HI, HS, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NOTNUM };
template <Comparison C, class T>
bool compared(T a, T b) {
  if constexpr (is_float<T>) {
    const double x = a, y = b;
    const bool unordered = std::isnan(x) || std::isnan(y);
    if (C == NUM || C == NOTNUM) return unordered == (C == NOTNUM);
    if (unordered) return C >= EQU;
    constexpr int c = C >= EQU ? C - EQU : C;
    return c == EQ ? x == y : c == NE ? x != y : c == LT ? x < y : c == LE ? x <= y : c == GT ? x > y : x >= y;
  } else {
    return C == EQ ? a == b : C == NE ? a != b : C == LT || C == LO ? a < b : C == LE || C == LS ? a <= b : C == GT || C == HI ? a > b : a >= b;
  }
}

template <class To, class From, unsigned F>
To cvt_(From x) {
  if constexpr (is_float<To> && is_float<From>) {
    double value = flushed<F>(x);
    if constexpr (F & INT) value = F & RZ ? std::trunc(value) : F & RM ? std::floor(value) : F & RP ? std::ceil(value) : std::nearbyint(value);
    if constexpr (F & SAT) value = value > 0 ? std::min(value, 1.0) : 0.0;
    if constexpr (!std::is_floating_point_v<To>) return To(value, F & ~INT);
    else if constexpr (sizeof(To) < sizeof(From) && (F & (RZ | RM | RP))) return compute<To, F & ~(SAT | INT)>([value](To) { volatile double v = value; return static_cast<To>(v); }, To(0));
    else return flushed<F>(static_cast<To>(value));
  } else if constexpr (is_float<To>) {
    static_assert(std::is_floating_point_v<To> || sizeof(From) < 8);
    if constexpr (std::is_floating_point_v<To>) return compute<To, F>([x](To) { volatile From v = x; return static_cast<To>(v); }, To(0));
    else return To(static_cast<double>(x), F);
  } else if constexpr (is_float<From>) {
    const double value = flushed<F>(x), whole = F & RZ ? std::trunc(value) : F & RM ? std::floor(value) : F & RP ? std::ceil(value) : std::nearbyint(value);
    if (std::isnan(whole)) return 0;
    if (whole >= std::ldexp(1.0, 8 * sizeof(To) - std::is_signed_v<To>)) return std::numeric_limits<To>::max();
    return whole < static_cast<double>(std::numeric_limits<To>::min()) ? std::numeric_limits<To>::min() : static_cast<To>(whole);
  } else if constexpr (F & SAT) {
    return static_cast<To>(std::clamp<__int128>(x, std::numeric_limits<To>::min(), std::numeric_limits<To>::max()));
  } else {
    return static_cast<To>(x);
  }
}
/// To a pair: the first is the high half.
template <class To, class From, unsigned F>
To cvt_(From high, From low) {
  return {cvt_<decltype(To::low), From, F>(low), cvt_<decltype(To::high), From, F>(high)};
}
template <class To, class From, unsigned F>
std::enable_if_t<is_pair<From>, To> cvt_pair_(From x) {
  return {cvt_<decltype(To::low), decltype(From::low), F>(x.low), cvt_<decltype(To::high), decltype(From::high), F>(x.high)};
}

// ---- a launch's memory and threads ----------------------------------------------------------------------------------------------------------

struct Range {
  u64 begin, end;
};
struct Dim {
  u32 x, y, z;
};
enum Space { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };
enum Access { READ, WRITE };

struct Thread;
using Body = void (*)(Thread&);

/// Lanes that come to one place with something each, and go on with what all have brought.
struct Meeting {
  u32 mask = 0, arrived = 0, line = 0, round = 0;
  alignas(16) u8 brought[2][32][48];  // of this round, and of the one before, which may still be read
};
struct Warp {
  u32 lanes = 0;
  std::vector<Meeting*> meetings;  // by mask
  u32 asks[32] = {}, active[32];   // of a lane: the line where it asks who is there, and the answer
};
struct Barrier {
  u32 arrived = 0, wanted = 0, round = 0, line = 0;
};
struct Mbarrier {
  u32 count, pending, phase;
  s64 bytes;  // expected, less those that have arrived
};
struct BulkCopy {
  Thread* by;
  u64 to, from;
  u32 bytes;
  u64 barrier;
  u32 line;
  bool awaited;  // by a thread that waits for its mbarrier
};
enum Written : u8 { NEVER, WRITTEN, COPIED };  // COPIED: by a bulk copy that is under way
struct Block {
  Dim at;
  u8* shared = nullptr;
  std::vector<u8> written;  // bytes of shared memory: see Written
  u32 alive = 0;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::map<u64, Mbarrier> mbarriers;  // by address
  std::vector<BulkCopy> copies;       // under way
  bool stuck = false;                 // nothing came about in the last turn of all threads
};
struct Launch {
  const char *symbol, *source;
  Body body;
  Dim grid, block;
  std::vector<void*> parameters;
  u64 shared_bytes;
  u32 alive;                  // threads
  bool reversed;              // their order
  std::vector<Range> ranges;  // other memory that may be touched, in order
  Range last = {1, 1};        // touched
  jmp_buf scheduler, end;
  u64 clock = 0;     // a tick for each time that it is read
  u64 progress = 0;  // how often something came about that others may have waited for
  u64 waits = 0;     // how often a thread let others run that can go on without them
  char* error;
  size_t error_size;
};
struct Copy {
  u64 to, from;
  u32 bytes, of;  // the last are zeros
  int group;
};
struct Thread {
  Launch* launch;
  Block* block;
  Dim at;
  u32 lane, number;
  jmp_buf place;
  ucontext_t begin;
  u8* stack;
  bool started, ended;
  u32 line;
  const char* waits;
  std::vector<Copy> copies;
  int group;
  u32 turns;
  bool polls;  // has read what other threads may change, in this turn of a loop
};
constexpr size_t kStack = 1 << 20;  // code that is not optimized has large frames

[[noreturn, gnu::format(printf, 3, 4), gnu::noinline]] inline void fault(Thread& t, u32 line, const char* format, ...) {
  Launch& l = *t.launch;
  char text[1024] = "", what[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  if (FILE* file = fopen(l.source, "r")) {
    for (u32 n = 0; n < line && fgets(text, sizeof text, file); ++n) {}
    fclose(file);
  }
  snprintf(l.error, l.error_size, "%s: %s, in block (%u, %u, %u), thread (%u, %u, %u), at %s:%u: %s", l.symbol, what, t.block->at.x, t.block->at.y, t.block->at.z,
           t.at.x, t.at.y, t.at.z, l.source, line, text);
  longjmp(l.end, 1);
}

/// Lets the others run.
[[gnu::noinline]] inline void yield(Thread& t, u32 line, const char* waits) {
  t.line = line, t.waits = waits;
  if (!_setjmp(t.place)) _longjmp(t.launch->scheduler, 1);
}

static volatile sig_atomic_t interrupted;
static struct sigaction before_us;
inline void on_interrupt(int number, siginfo_t* info, void* context) {
  interrupted = 1;
  if (before_us.sa_flags & SA_SIGINFO) before_us.sa_sigaction(number, info, context);
  else before_us.sa_handler(number);
}
/// A launch's time, in which Ctrl-C ends it, too: its process's own handler can only ask for that.
struct Interruptible {
  bool ours = false;
  Interruptible() {
    interrupted = 0;
    struct sigaction own = {}, now;
    own.sa_sigaction = on_interrupt, own.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    if (sigaction(SIGINT, nullptr, &now) || now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN || now.sa_sigaction == on_interrupt) return;
    before_us = now;
    ours = !sigaction(SIGINT, &own, nullptr);
  }
  ~Interruptible() {
    if (ours) sigaction(SIGINT, &before_us, nullptr);
  }
};

/// The end of a loop's turn. One that waits for what another thread writes has to let it run.
inline void turn(Thread& t, u32 line) {
  if (++t.turns % (1 << 16) && !t.polls) return;
  t.polls = false;
  if (interrupted) fault(t, line, "interrupted");
  ++t.launch->waits;
  yield(t, line, "the end of a loop");
}

inline Thread& poll(Thread& t) { return t.polls = true, t; }

/// Of the 16 bytes that hold a tensor's last, all may be read: allocations of a GPU are of more.
[[gnu::noinline]] inline void check_range(Thread& t, u64 address, u32 bytes, Access access, u32 line) {
  Launch& l = *t.launch;
  const auto end_of = [access](const Range& range) { return access == READ ? (range.end + 15) & ~u64(15) : range.end; };
  Range& last = l.last;
  if (address - last.begin < last.end - last.begin && address + bytes <= end_of(last)) return;
  // 16 aligned bytes lie in one allocation if one of them does, so that they may be read whole.
  const u64 until = access == READ ? address | 15 : address;
  const auto after = std::upper_bound(l.ranges.begin(), l.ranges.end(), until, [](u64 a, const Range& r) { return a < r.begin; });
  if (after == l.ranges.begin() || address + bytes > end_of(after[-1])) {
    const s64 past = after == l.ranges.begin() ? 0 : static_cast<s64>(address - after[-1].end);
    fault(t, line, "%u bytes at %#llx are out of bounds: %lld bytes past the end of the memory before", bytes, (unsigned long long)address, (long long)past);
  }
  last = after[-1];
}

/// The host's pointer to what an instruction touches.
inline u8* touch(Thread& t, u64 address, u32 bytes, Space space, Access access, u32 line) {
  Launch& l = *t.launch;
  if (address % bytes) fault(t, line, "%u bytes at %#llx are misaligned", bytes, (unsigned long long)address);
  const u64 offset = address - (u64)t.block->shared;
  if (offset < l.shared_bytes && space != GLOBAL) {
    if (offset + bytes > l.shared_bytes) fault(t, line, "past the end of shared memory");
    u8* const written = &t.block->written[offset];
    if (!t.block->copies.empty() && memchr(written, COPIED, bytes)) fault(t, line, "a copy to byte %llu of shared memory is under way", (unsigned long long)offset);
    if (access == READ) {
      for (u32 i = 0; i < bytes; ++i)
        if (!written[i]) fault(t, line, "byte %llu of shared memory was never written", (unsigned long long)(offset + i));
    } else {
      memset(written, WRITTEN, bytes);
    }
  } else if (space == SHARED) {
    fault(t, line, "%#llx, %lld bytes from the start of shared memory, is outside of its %llu", (unsigned long long)address, (long long)offset,
          (unsigned long long)l.shared_bytes);
  } else if (address - (u64)t.stack >= kStack || space == GLOBAL) {
    check_range(t, address, bytes, access, line);
  }
  return (u8*)address;
}
template <class T>
T load(const u8* at, int i = 0) {
  return as<T>(*(const T*)(at + i * sizeof(T)));
}
template <class T>
void store(u8* at, int i, T value) {
  memcpy(at + i * sizeof(T), &value, sizeof value);
}

inline u32 processors() { return static_cast<u32>(atoi(getenv("STAND_IN_SMS") ? getenv("STAND_IN_SMS") : "132")); }

// ---- barriers, and what a warp does together --------------------------------------------------------------------------------------------------

inline void arrive(Thread& t, Barrier& b, u32 wanted, u32 line) {
  const u32 threads = t.launch->block.x * t.launch->block.y * t.launch->block.z;
  if (b.arrived && b.wanted != wanted) fault(t, line, "a barrier for %u threads, where others wait for %u", wanted, b.wanted);
  if (!wanted && b.arrived && b.line != line) fault(t, line, "a barrier of the whole block, of which other threads wait at another, line %u", b.line);
  if (wanted % 32 || wanted > (threads + 31) / 32 * 32) fault(t, line, "a barrier for %u of %u threads", wanted, threads);
  b.wanted = wanted, b.line = line, ++b.arrived;
  if (b.arrived == (wanted ? wanted : t.block->alive)) b.arrived = 0, ++b.round, ++t.launch->progress;
}
inline void bar_sync(Thread& t, u32 number, u32 wanted, u32 line) {
  Barrier& b = t.block->barriers[number & 15];
  const u32 round = b.round;
  arrive(t, b, wanted, line);
  while (b.round == round) yield(t, line, "a barrier");
}
inline void bar_arrive(Thread& t, u32 number, u32 wanted, u32 line) { arrive(t, t.block->barriers[number & 15], wanted, line); }

/// What all lanes of the mask have brought, by lane.
template <class P>
const P* meet(Thread& t, u32 mask, const P& mine, u32 line) {
  static_assert(sizeof(P) <= sizeof(Meeting::brought[0][0]));
  Warp& warp = t.block->warps[t.number / 32];
  mask &= warp.lanes;
  if (!(mask >> t.lane & 1)) fault(t, line, "lane %u is not in the mask %#x that it names", t.lane, mask);
  auto found = std::find_if(warp.meetings.begin(), warp.meetings.end(), [&](Meeting* m) { return m->mask == mask; });
  if (found == warp.meetings.end()) found = warp.meetings.insert(found, new Meeting), (*found)->mask = mask;
  Meeting& m = **found;
  const u32 round = m.round;
  if (m.arrived && m.line != line) fault(t, line, "other lanes of the mask %#x are at line %u", mask, m.line);
  m.line = line;
  u8(*slots)[48] = m.brought[round & 1];
  memcpy(slots[t.lane], &mine, sizeof mine);
  m.arrived |= 1u << t.lane;
  if (m.arrived == mask) m.arrived = 0, ++m.round, ++t.launch->progress;
  while (m.round == round) yield(t, line, "lanes of its warp");
  static thread_local P all[32];
  for (int i = 0; i < 32; ++i) memcpy(&all[i], slots[i], sizeof(P));
  return all;
}
inline void bar_warp_sync(Thread& t, u32 mask, u32 line) { meet(t, mask, 0, line); }

enum Shuffle { IDX, UP, DOWN, BFLY };
template <Shuffle kind>
bool shfl(Thread& t, u32& out, u32 value, u32 by, u32 clamp, u32 mask, u32 line) {
  const u32 first = clamp >> 8 & 31 & t.lane, most = first | (clamp & 31 & ~(clamp >> 8 & 31));
  by &= 31;
  const int from = kind == UP ? int(t.lane) - int(by) : kind == DOWN ? int(t.lane + by) : kind == BFLY ? int(t.lane ^ by) : int(first | (by & ~(clamp >> 8 & 31)));
  const bool inside = kind == UP ? from >= int(most) : from <= int(most);  // up: the clamp's low bits are 0
  const u32 source = inside ? u32(from) : t.lane;
  const u32* all = meet(t, mask, value, line);
  if (!(mask & t.block->warps[t.number / 32].lanes & 1u << source)) fault(t, line, "a shuffle from lane %u, which is not in the mask %#x", source, mask);
  out = all[source];
  return inside;
}
enum Vote { ALL, ANY, UNI, BALLOT };
template <Vote kind>
u32 vote(Thread& t, bool mine, u32 mask, u32 line) {
  const bool* all = meet(t, mask, mine, line);
  u32 found = 0;
  mask &= t.block->warps[t.number / 32].lanes;
  for (int i = 0; i < 32; ++i) found |= u32((mask >> i & 1) && all[i]) << i;
  return kind == BALLOT ? found : kind == ALL ? found == mask : kind == ANY ? found != 0 : found == mask || !found;
}
template <class T>
u32 match_any(Thread& t, T mine, u32 mask, u32 line) {
  const T* all = meet(t, mask, mine, line);
  u32 found = 0;
  for (int i = 0; i < 32; ++i) found |= u32((mask & t.block->warps[t.number / 32].lanes) >> i & 1 && all[i] == mine) << i;
  return found;
}
template <class T, class Op>
T redux(Thread& t, T mine, u32 mask, const Op& op, u32 line) {
  const T* all = meet(t, mask, mine, line);
  T found{};
  bool any = false;
  for (int i = 0; i < 32; ++i)
    if ((mask & t.block->warps[t.number / 32].lanes) >> i & 1) found = any ? op(found, all[i]) : all[i], any = true;
  return found;
}

/// The lanes that are at this place when the block's other threads can go no further without them.
inline u32 activemask(Thread& t, u32 line) {
  Warp& warp = t.block->warps[t.number / 32];
  warp.asks[t.lane] = line, ++t.launch->progress;
  while (warp.asks[t.lane]) {
    const u64 before = t.launch->progress;
    ++t.launch->waits;
    yield(t, line, "lanes of its warp");
    if (before != t.launch->progress || !warp.asks[t.lane]) continue;
    u32 mask = 0;
    for (u32 i = 0; i < 32; ++i) mask |= u32(warp.asks[i] == line) << i;
    for (u32 i = 0; i < 32; ++i)
      if (mask >> i & 1) warp.asks[i] = 0, warp.active[i] = mask;
    ++t.launch->progress;
  }
  return warp.active[t.lane];
}

/// Eight rows of sixteen bytes for each matrix, at the addresses that eight lanes give.
template <int kMatrices, bool kTrans, class... R>
void ldmatrix(Thread& t, u64 address, u32 line, R&... out) {
  const u64* all = meet(t, ~0u, address, line);
  u32* to[] = {&out...};
  for (int m = 0; m < kMatrices; ++m) {
    u32 value = 0;
    for (u32 half = 0; half < 2; ++half) {
      const u32 row = kTrans ? 2 * (t.lane % 4) + half : t.lane / 4, column = kTrans ? t.lane / 4 : 2 * (t.lane % 4) + half;
      if (all[8 * m + row] % 16) fault(t, line, "a row of ldmatrix is misaligned");
      value |= u32(load<u16>(touch(t, all[8 * m + row] + 2 * column, 2, SHARED, READ, line))) << 16 * half;
    }
    *to[m] = value;
  }
}

/// A matrix of 8 x 8, of which a lane has two elements of row lane / 4, transposed.
inline u32 movmatrix(Thread& t, u32 word, u32 line) {
  const u32 *all = meet(t, ~0u, word, line), column = t.lane / 4, row = 2 * (t.lane % 4), shift = 16 * (column % 2);
  return (all[4 * row + column / 2] >> shift & 0xffff) | (all[4 * row + 4 + column / 2] >> shift) << 16;
}

template <class T>
double element(const u32* registers, int n) {  // the n-th of packed ones
  if constexpr (sizeof(T) == 4) return bits<f32>(registers[n] & ~0x1fffu);  // tf32
  else return as<T>(static_cast<u64>(registers[n / (4 / sizeof(T))]) >> 8 * sizeof(T) * (n % (4 / sizeof(T))));
}
/// D[16 x 8] = A[16 x K] B[K x 8] + C. An element of A, B is in the register and lane that PTX's figures for m16n8kK show: a lane holds pieces of
/// 32 bits, along K, of rows lane / 4 and eight further, in the columns lane % 4 of a half of K.
template <class A, class B, class Sum, int K, int kA, int kB>
void mma(Thread& t, Sum (&d)[4], const u32 (&a)[kA], const u32 (&b)[kB], const Sum (&c)[4], u32 line) {
  struct Operands {
    u32 a[kA], b[kB];
  } mine;
  memcpy(mine.a, a, sizeof a), memcpy(mine.b, b, sizeof b);
  const Operands* all = meet(t, ~0u, mine, line);
  constexpr int kPiece = 4 / sizeof(A), kStripe = 4 * kPiece;  // elements of K in a register, in a group of four lanes
  for (int i = 0; i < 4; ++i) {
    const int row = i / 2, column = int(t.lane % 4) * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < K; ++k) {
      const int stripe = k / kStripe, lane = k % kStripe / kPiece, within = k % kPiece;
      sum += element<A>(all[t.lane / 4 * 4 + lane].a, (2 * stripe + row) * kPiece + within) * element<B>(all[column * 4 + lane].b, stripe * kPiece + within);
    }
    d[i] = static_cast<Sum>(sum);
  }
}

// ---- cp.async ------------------------------------------------------------------------------------------------------------------------------

inline void cp_async(Thread& t, u64 to, u64 from, u32 bytes, u32 of, u32 line) {
  if (of > bytes || (bytes != 4 && bytes != 8 && bytes != 16)) fault(t, line, "%u of %u bytes", of, bytes);
  if (to % bytes || from % bytes) fault(t, line, "%u bytes from %#llx to %#llx are misaligned", bytes, (unsigned long long)from, (unsigned long long)to);
  if (to - (u64)t.block->shared >= t.launch->shared_bytes) fault(t, line, "cp.async to what is not shared memory");
  if (of) check_range(t, from, of, READ, line);
  t.copies.push_back({to, from, bytes, of, t.group});
}
/// Until at most so many of the latest groups are under way. -1: until nothing is.
inline void cp_async_wait(Thread& t, int pending, u32 line) {
  const auto done = [&](const Copy& copy) {
    if (pending >= 0 && copy.group >= t.group - pending) return false;
    u8* to = touch(t, copy.to, copy.bytes, SHARED, WRITE, line);
    memset(to, 0, copy.bytes);
    memcpy(to, (const void*)copy.from, copy.of);
    return true;
  };
  t.copies.erase(std::remove_if(t.copies.begin(), t.copies.end(), done), t.copies.end());
}

// ---- mbarriers, and the bulk copies that they wait for ----------------------------------------------------------------------------------------

inline Mbarrier& mbarrier_at(Thread& t, u64 address, u32 line) {
  const auto found = t.block->mbarriers.find(address);
  if (found == t.block->mbarriers.end()) fault(t, line, "no mbarrier is at %#llx", (unsigned long long)address);
  return found->second;
}
inline void mbarrier_init(Thread& t, u64 address, u32 count, u32 line) {
  touch(t, address, 8, SHARED, WRITE, line);
  t.block->mbarriers[address] = {count, count, 0, 0};
}
/// Ends the phase if nothing is missing.
inline void settle(Thread& t, u64 address, u32 line) {
  Mbarrier& b = mbarrier_at(t, address, line);
  if (b.pending || b.bytes > 0) return;
  s64 more = -b.bytes;
  for (const BulkCopy& copy : t.block->copies) more += copy.barrier == address ? copy.bytes : 0;
  if (more) fault(t, line, "an mbarrier's phase ends, and no thread expects %lld bytes that are copied for it", (long long)more);
  b.pending = b.count, b.phase ^= 1, ++t.launch->progress;
}
inline void mbarrier_arrive(Thread& t, u64 address, u32 count, u32 bytes, u32 line) {
  Mbarrier& b = mbarrier_at(t, address, line);
  if (count > b.pending) fault(t, line, "an arrival too many: the mbarrier's phase waits for %u of %u, and for %lld bytes", b.pending, b.count, (long long)b.bytes);
  b.pending -= count, b.bytes += bytes;
  settle(t, address, line);
}
inline void cp_async_bulk(Thread& t, u64 to, u64 from, u32 bytes, u64 barrier, u32 line) {
  const u64 offset = to - (u64)t.block->shared, size = t.launch->shared_bytes;
  if (to % 16 || from % 16 || bytes % 16) fault(t, line, "%u bytes from %#llx to %#llx are misaligned", bytes, (unsigned long long)from, (unsigned long long)to);
  if (offset >= size || bytes > size - offset) fault(t, line, "cp.async.bulk to what is not the block's shared memory");
  check_range(t, from, bytes, READ, line);
  mbarrier_at(t, barrier, line);
  u8* const written = &t.block->written[offset];
  if (memchr(written, COPIED, bytes)) fault(t, line, "a copy to where another is under way, byte %llu of shared memory", (unsigned long long)offset);
  memset(written, COPIED, bytes);
  t.block->copies.push_back({&t, to, from, bytes, barrier, line, false});
}
/// Copies that a thread waits for arrive: those of the oldest one's mbarrier; in the reversed order of the newest one's.
inline void receive(Launch& l, std::vector<BulkCopy>& copies) {
  const auto is_awaited = [](const BulkCopy& copy) { return copy.awaited; };
  const auto oldest = std::find_if(copies.begin(), copies.end(), is_awaited);
  if (oldest == copies.end()) return;
  const BulkCopy chosen = l.reversed ? *std::find_if(copies.rbegin(), copies.rend(), is_awaited) : *oldest;
  Mbarrier& b = mbarrier_at(*chosen.by, chosen.barrier, chosen.line);
  const auto arrives = [&](const BulkCopy& copy) {
    if (copy.barrier != chosen.barrier) return false;
    memcpy((void*)copy.to, (const void*)copy.from, copy.bytes);
    memset(&copy.by->block->written[copy.to - (u64)copy.by->block->shared], WRITTEN, copy.bytes);
    b.bytes -= copy.bytes;
    return true;
  };
  copies.erase(std::remove_if(copies.begin(), copies.end(), arrives), copies.end());
  ++l.progress;
  settle(*chosen.by, chosen.barrier, chosen.line);
}
/// Whether the phase has ended. Copies arrive when the other threads have had their turn; in the reversed order, when all can go no further without.
inline bool mbarrier_try_wait(Thread& t, u64 address, u32 parity, u32 line) {
  const auto ended = [&] { return mbarrier_at(t, address, line).phase != (parity & 1); };
  if (ended()) return true;
  for (BulkCopy& copy : t.block->copies)
    if (copy.barrier == address) copy.awaited = true, ++t.launch->waits;
  yield(t, line, "an mbarrier");
  if (!t.launch->reversed || t.block->stuck) t.block->stuck = false, receive(*t.launch, t.block->copies);
  return ended();
}

// ---- running -------------------------------------------------------------------------------------------------------------------------------

static thread_local Thread* starting;
inline void enter() {
  Thread& t = *starting;
  t.launch->body(t);
  t.ended = true;
  ++t.launch->progress, --t.block->alive, --t.launch->alive;
  if (const auto& copies = t.block->copies; !t.block->alive && !copies.empty()) fault(*copies[0].by, copies[0].line, "its block ends while this copy is under way");
  for (Barrier& b : t.block->barriers)
    if (b.arrived && !b.wanted && b.arrived == t.block->alive) b.arrived = 0, ++b.round;
  _longjmp(t.launch->scheduler, 1);
}

/// Blocks that run at once.
inline void run_blocks(Launch& l, std::vector<Block>& blocks, std::vector<Thread>& threads) {
  const u32 all = l.alive = static_cast<u32>(threads.size()), count = all / static_cast<u32>(blocks.size());
  const bool filled = getenv("STAND_IN_UNWRITTEN") && !strcmp(getenv("STAND_IN_UNWRITTEN"), "nan");
  for (Block& block : blocks) {
    block.alive = count;
    block.warps.resize((count + 31) / 32);
    block.written.assign(l.shared_bytes, filled ? WRITTEN : NEVER);
    if (filled) memset(block.shared, 0xff, l.shared_bytes);
  }
  for (u32 n = 0; n < all; ++n) {
    Thread& t = threads[n];
    const u32 i = n % count;
    t.launch = &l, t.block = &blocks[n / count], t.number = i, t.lane = i % 32, t.started = t.ended = t.polls = false, t.group = 0, t.turns = 0;
    t.at = {i % l.block.x, i / l.block.x % l.block.y, i / (l.block.x * l.block.y)};
    t.copies.clear();
    t.block->warps[i / 32].lanes |= 1u << i % 32;
  }
  l.reversed = getenv("STAND_IN_ORDER") && !strcmp(getenv("STAND_IN_ORDER"), "reversed");
  for (volatile u64 before = ~u64(0), progress = before; l.alive;) {
    if (before == l.progress + l.waits) {
      for (Thread& t : threads)
        if (!t.ended) fault(t, t.line, "waits for %s, and so does every other thread that has not ended (%u of %u)", t.waits, t.block->alive, count);
    }
    for (Block& block : blocks) block.stuck = progress == l.progress;
    before = l.progress + l.waits, progress = l.progress;
    for (volatile u32 i = 0; i < all; ++i) {
      Thread& t = threads[l.reversed ? all - 1 - i : i];
      if (t.ended || _setjmp(l.scheduler)) continue;
      if (t.started) _longjmp(t.place, 1);
      t.started = true, starting = &t;
      getcontext(&t.begin);
      t.begin.uc_stack = {t.stack, 0, kStack}, t.begin.uc_link = nullptr;
      makecontext(&t.begin, enter, 0);
      setcontext(&t.begin);
    }
  }
  for (Block& block : blocks)
    for (Warp& warp : block.warps)
      for (Meeting* m : warp.meetings) delete m;
}

struct Kernel {
  const char* symbol;
  Body body;
  u64 shared_bytes;  // static
  std::vector<std::pair<u32, u32>> parameters;  // size and alignment
  u32 most_threads;
};

/// So many pieces of memory, at least.
inline void grow(std::vector<u8*>& pieces, size_t count, size_t size, int flags) {
  while (pieces.size() < count) pieces.push_back((u8*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0));
}
/// One launch; false: `error` says what went wrong. Its parameters are given one by one, or packed. `ranges`: memory of tensors; none: it is not known,
/// and nothing is out of bounds.
inline bool run(const Kernel& kernel, const char* source, const Dim& grid, const Dim& block, u64 shared_bytes, bool cooperative, void** given, u8* packed,
                const Range* ranges, u64 count, const std::vector<Range>& variables, char* error, size_t error_size) {
  static thread_local std::vector<u8*> windows, stacks;
  Launch l;
  l.symbol = kernel.symbol, l.source = source, l.body = kernel.body, l.grid = grid, l.block = block;
  l.shared_bytes = kernel.shared_bytes + shared_bytes, l.error = error, l.error_size = error_size;
  l.ranges.assign(ranges, ranges + count);
  if (!count) l.ranges.push_back({4096, ~u64(0) >> 1});
  l.ranges.insert(l.ranges.end(), variables.begin(), variables.end());
  u64 offset = 0;
  for (const auto& [size, alignment] : kernel.parameters) {
    offset = (offset + alignment - 1) / alignment * alignment;
    l.parameters.push_back(given ? given[l.parameters.size()] : packed + offset);
    l.ranges.push_back({(u64)l.parameters.back(), (u64)l.parameters.back() + size});
    offset += size;
  }
  std::sort(l.ranges.begin(), l.ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  const u64 size = u64(block.x) * block.y * block.z, all = u64(grid.x) * grid.y * grid.z, at_once = cooperative ? all : 1;
  if (kernel.most_threads && size > kernel.most_threads) return snprintf(error, error_size, "%s: a block of %llu threads, where its launch bounds allow %u", kernel.symbol, (unsigned long long)size, unsigned(kernel.most_threads)), false;
  std::vector<Thread> threads(size * at_once);
  std::vector<Block> blocks;
  grow(windows, at_once, 1 << 20, MAP_32BIT), grow(stacks, threads.size(), kStack, MAP_NORESERVE);
  for (size_t i = 0; i < threads.size(); ++i) threads[i].stack = stacks[i];
  const Interruptible here;
  if (_setjmp(l.end)) return false;
  for (u64 first = 0; first < all; first += at_once) {
    blocks.assign(at_once, Block());
    for (u64 i = 0, n = first; i < at_once; ++i, ++n) {
      blocks[i].at = {u32(n % grid.x), u32(n / grid.x % grid.y), u32(n / grid.x / grid.y)};
      blocks[i].shared = windows[i];
    }
    run_blocks(l, blocks, threads);
  }
  return true;
}
