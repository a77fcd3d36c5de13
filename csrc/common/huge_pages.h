// Fresh memory in large pages. Included by binding.h for its two halves.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace flexops::detail {

/// Asks for transparent huge pages for memory that an op is about to fill. A result of 32 MiB is
/// fresh from the system at each call, and taking 8192 page faults for it costs six times what
/// dequantizing costs (the same is true of torch's own ops, which are left as they are). It is a
/// hint: where the system has them switched off (/sys/kernel/mm/transparent_hugepage/enabled),
/// nothing changes.
inline void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kWorthwhile = int64_t{4} << 20;  // holds a whole huge page wherever it begins
  if (bytes < kWorthwhile) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data), first = (begin + page - 1) & ~(page - 1),
             last = (begin + static_cast<uintptr_t>(bytes)) & ~(page - 1);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace flexops::detail
