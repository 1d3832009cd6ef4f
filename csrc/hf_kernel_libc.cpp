// What would ask for a newer glibc or libstdc++ than manylinux_2_28 has (2.28, GLIBCXX_3.4.25), for
// the copy of the op library that stands alone: it is built on any machine and loaded on older
// ones. CMakeLists.txt links it with --wrap=log,--wrap=fstat. tests/hf_kernel_proof/prove.py
// checks.
#include <sys/stat.h>

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
}

#endif

// Members that GCC 9 and 11 moved into the library, once more in here.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

namespace std {
void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std
