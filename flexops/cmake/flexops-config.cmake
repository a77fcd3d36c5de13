# find_package(flexops CONFIG REQUIRED): flexops' headers and flags for people who build with CMake (docs/builder.md).
#
#   execute_process(COMMAND ${Python_EXECUTABLE} -m flexops cmake-dir OUTPUT_VARIABLE flexops_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
#   find_package(flexops CONFIG REQUIRED)
#
# Targets: flexops::headers (common/*.cuh and *.h, for .cu and .cpp alike), flexops::binding (the same with the flags of common/binding.h).
# Function: flexops_cpu_sources(<target> <source>...), CPU kernels for each instruction set.
cmake_minimum_required(VERSION 3.18)

get_filename_component(flexops_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../_csrc" ABSOLUTE) # in an installed package
if(NOT EXISTS "${flexops_INCLUDE_DIR}/common/tensor_view.h")
  get_filename_component(flexops_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../../csrc" ABSOLUTE) # in a checkout
endif()
if(NOT EXISTS "${flexops_INCLUDE_DIR}/common/tensor_view.h")
  set(flexops_FOUND FALSE)
  set(flexops_NOT_FOUND_MESSAGE "flexops' headers are not beside ${CMAKE_CURRENT_LIST_DIR}: install flexops-torch again")
  return()
endif()

if(NOT TARGET flexops::headers)
  add_library(flexops::headers INTERFACE IMPORTED)
  target_include_directories(flexops::headers INTERFACE "${flexops_INCLUDE_DIR}")
  target_compile_features(flexops::headers INTERFACE cxx_std_17)
endif()

get_property(flexops_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
if("CXX" IN_LIST flexops_languages AND NOT TARGET flexops::binding) # bindings are C++; headers serve a project of CUDA alone
  # torch's stable ABI: nothing of torch is included, and what is linked with has its name and its functions, and no code. The process that opens the
  # library has the real one loaded; so no RPATH to this one, which CMake would write for a target or a path among libraries.
  if(NOT TARGET flexops_torch_stub)
    file(WRITE "${CMAKE_BINARY_DIR}/flexops/torch_stub.cpp" "#define FLEXOPS_TORCH_BODY {return(0);}\n#include \"common/torch_abi.h\"\n")
    add_library(flexops_torch_stub SHARED "${CMAKE_BINARY_DIR}/flexops/torch_stub.cpp")
    target_link_libraries(flexops_torch_stub PRIVATE flexops::headers)
    target_compile_options(flexops_torch_stub PRIVATE -w)
    set_target_properties(flexops_torch_stub PROPERTIES OUTPUT_NAME torch_cpu LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/flexops")
  endif()
  add_library(flexops::binding INTERFACE IMPORTED)
  target_link_libraries(flexops::binding INTERFACE flexops::headers ${CMAKE_DL_LIBS})
  target_link_options(flexops::binding INTERFACE "LINKER:--push-state,--no-as-needed,$<TARGET_FILE:flexops_torch_stub>,--pop-state")
  target_compile_definitions(flexops::binding INTERFACE FLEXOPS_STABLE_ABI=0x020b000000000000)
  add_dependencies(flexops::binding flexops_torch_stub)
endif()

set(flexops_ISA_FLAGS_baseline "")
set(flexops_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(flexops_ISA_FLAGS_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq)

# CPU kernels, compiled into the target once for each instruction set, with FLEXOPS_ISA naming it (common/cpu.h).
function(flexops_cpu_sources target)
  set(levels baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(APPEND levels avx2 avx512)
  endif()
  foreach(level IN LISTS levels)
    add_library(${target}_${level} OBJECT ${ARGN})
    target_link_libraries(${target}_${level} PRIVATE flexops::headers)
    target_compile_definitions(${target}_${level} PRIVATE FLEXOPS_ISA=${level})
    target_compile_options(${target}_${level} PRIVATE -O3 ${flexops_ISA_FLAGS_${level}})
    set_target_properties(${target}_${level} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${level}>)
  endforeach()
endfunction()
