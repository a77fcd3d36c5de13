// The GPU that an operator's call is about, for its launchers.
#pragma once

namespace flexops::detail {
/// Of this thread's latest DeviceGuard.
inline thread_local int guarded_gpu = 0;
}  // namespace flexops::detail

namespace flexops {
inline int current_gpu() { return detail::guarded_gpu; }
}  // namespace flexops
