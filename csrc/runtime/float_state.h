// The floating-point environment that results are defined in: round to nearest even, subnormal
// numbers as they are, no traps. A thread may have another (torch.set_flush_denormal, fesetround, a
// library built with -ffast-math), and a pool's threads inherit that of whoever made them.
// Must not know what is computed.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace bitnet {

// Sets the calling thread's state to the default, and puts back what was there. Reading it costs a
// nanosecond, writing it some more, so it is written only where it differs.
class DefaultFloatState {
 public:
  DefaultFloatState() : caller_(read()) {
    if ((caller_ & kControl) != kDefault) write(kDefault);
  }
  ~DefaultFloatState() {
    if ((caller_ & kControl) != kDefault) write(caller_);
  }
  DefaultFloatState(const DefaultFloatState&) = delete;
  DefaultFloatState& operator=(const DefaultFloatState&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kControl = 0xffc0;  // of MXCSR: all but the sticky flags of past operations
  static constexpr Word kDefault = 0x1f80;  // every exception masked
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kControl = ~Word{0};  // of FPCR; the flags are in FPSR
  static constexpr Word kDefault = 0;
  static Word read() {
    Word word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { __asm__ volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
  using Word = uint32_t;
  static constexpr Word kControl = 0, kDefault = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  Word caller_;
};

}  // namespace bitnet
