// What bindings use of libstdc++ and of libgcc, in every version of these since GCC 5. With zig, which has neither, libraries are linked
// against the library that this makes (plan.py), under libstdc++'s name: torch has brought that and what it needs, and an exception that
// torch is to catch must be thrown by the one that it was compiled with.
#define FUNCTION(name) \
  void name(void) {}
FUNCTION(_Unwind_Resume)
FUNCTION(__cxa_allocate_exception)
FUNCTION(__cxa_begin_catch)
FUNCTION(__cxa_end_catch)
FUNCTION(__cxa_free_exception)
FUNCTION(__cxa_guard_abort)
FUNCTION(__cxa_guard_acquire)
FUNCTION(__cxa_guard_release)
FUNCTION(__cxa_throw)
FUNCTION(__gxx_personality_v0)
FUNCTION(_Znwm)                          // operator new
FUNCTION(_ZdlPvm)                        // operator delete
FUNCTION(_ZSt9terminatev)                // std::terminate
FUNCTION(_ZNSt9exceptionD2Ev)            // std::exception
FUNCTION(_ZNSt11logic_errorC2EPKc)       // std::logic_error
FUNCTION(_ZNSt9bad_allocD2Ev)            // std::bad_alloc
FUNCTION(_ZNSt12length_errorD1Ev)        // std::length_error
FUNCTION(_ZNSt20bad_array_new_lengthD1Ev)  // std::bad_array_new_length

#define OBJECT(name) char name[1];
OBJECT(_ZTISt9exception)
OBJECT(_ZTISt12length_error)
OBJECT(_ZTISt20bad_array_new_length)
OBJECT(_ZTVSt12length_error)
OBJECT(_ZTVSt9bad_alloc)
OBJECT(_ZTVSt9exception)
OBJECT(_ZTVSt20bad_array_new_length)
OBJECT(_ZTVN10__cxxabiv117__class_type_infoE)
OBJECT(_ZTVN10__cxxabiv120__si_class_type_infoE)
