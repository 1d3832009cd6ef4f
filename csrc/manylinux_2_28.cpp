// What a build on a newer system would ask of glibc and libstdc++ beyond manylinux_2_28
// (glibc 2.28, GLIBCXX_3.4.25), for the wheels (scripts/build_wheels) and the kernel that stands
// alone (scripts/build_hf_kernel). CMakeLists.txt links each of their libraries with this file, and
// with
// --wrap for the functions that got a newer version under their old name. Written against Debian
// 12; scripts/prove_wheel and tests/hf_kernel_proof/prove.py see what else another system asks for.
#include <pthread.h>
#include <sys/stat.h>

#include <exception>
#include <new>
#include <sstream>

#if defined(__x86_64__)
#define BITNET_FIRST_GLIBC "GLIBC_2.2.5"
constexpr int kStatVersion = 1;
#else  // aarch64
#define BITNET_FIRST_GLIBC "GLIBC_2.17"
constexpr int kStatVersion = 0;
#endif

#if defined(__GLIBC__)

extern "C" {

// Headers since 2.32 read it to leave out atomic operations in a process of one thread; false is
// right in any process.
char __libc_single_threaded = 0;

// log got a version without an error hook in 2.29; the numbers are the same.
double bitnet_first_log(double);
__asm__(".symver bitnet_first_log, log@" BITNET_FIRST_GLIBC);
double __wrap_log(double x) { return bitnet_first_log(x); }

// fstat was a macro over this before 2.33.
int bitnet_first_fxstat(int version, int file, struct stat* info);
__asm__(".symver bitnet_first_fxstat, __fxstat@" BITNET_FIRST_GLIBC);
int __wrap_fstat(int file, struct stat* info) {
  return bitnet_first_fxstat(kStatVersion, file, info);
}

// pthread_once moved from libpthread into libc in 2.34; it is one function.
int bitnet_first_pthread_once(pthread_once_t* once, void (*function)());
__asm__(".symver bitnet_first_pthread_once, pthread_once@" BITNET_FIRST_GLIBC);
int __wrap_pthread_once(pthread_once_t* once, void (*function)()) {
  return bitnet_first_pthread_once(once, function);
}
}

#endif

#if defined(__GLIBCXX__)

// Members that GCC 9 and 11 moved into the library, once more in here.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

// What copying and destroying an exception_ptr did inside the library before GCC 11 gave it names.
extern "C" {
void bitnet_copy_exception(void* to, const void* from) __asm__(
    "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void bitnet_destroy_exception(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
}

namespace std {

void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }

void __exception_ptr::exception_ptr::_M_addref() noexcept {
  void* copy = nullptr;  // never destroyed: the reference that it counts is the caller's
  bitnet_copy_exception(&copy, this);
}

void __exception_ptr::exception_ptr::_M_release() noexcept {
  bitnet_destroy_exception(this);
  _M_exception_object = nullptr;
}

}  // namespace std

#endif
