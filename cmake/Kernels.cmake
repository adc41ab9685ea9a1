# What is compiled of the kernels when the package is built. Neither is needed to run: Metal compiles the text on the
# user's machine, and so does the front end for NVIDIA GPUs.
file(GLOB_RECURSE kernels CONFIGURE_DEPENDS metal/*.metal)
file(GLOB_RECURSE kernel_headers CONFIGURE_DEPENDS metal/*.h)
# Those for matrix units are of Metal 4, which the library's floor of macOS does not have.
set(library_kernels ${kernels})
list(FILTER library_kernels EXCLUDE REGEX "/m5/")

# Recent Xcode brings the Metal compiler only on request: asking for its version tells whether it is there.
if(APPLE)
  execute_process(COMMAND xcrun -sdk macosx metal --version RESULT_VARIABLE no_metal_compiler OUTPUT_QUIET ERROR_QUIET)
  if(no_metal_compiler)
    message(STATUS "No Metal compiler: kernels are compiled at first use")
  else()
    mlx_build_metallib(
      TARGET mlx_mittens_metallib
      TITLE mlx_mittens
      SOURCES ${library_kernels}
      INCLUDE_DIRS "${CMAKE_CURRENT_SOURCE_DIR}/metal"
      DEPS ${kernel_headers}
      OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}")
    add_dependencies(mlx_mittens_core mlx_mittens_metallib)
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/mlx_mittens.metallib" DESTINATION mlx_mittens/metal)
  endif()
endif()

if(MITTENS_PTX)
  file(GLOB_RECURSE frontend CONFIGURE_DEPENDS mlx_mittens/frontend/*.py mlx_mittens/frontend/include/* csrc/simulator/abi.h)
  set(prebuild ${CMAKE_COMMAND} -E env --modify "PYTHONPATH=path_list_prepend:${CMAKE_CURRENT_SOURCE_DIR}/mlx_mittens"
               "${Python_EXECUTABLE}" -m frontend.prebuild)
  execute_process(COMMAND ${prebuild} --check ERROR_VARIABLE problem RESULT_VARIABLE status)
  if(status EQUAL 3)  # NO_CLANG of frontend/prebuild.py
    message(FATAL_ERROR "${problem}Built by pip, `-C mittens.ptx=true` brings a clang along with MITTENS_PTX.")
  elseif(NOT status EQUAL 0)
    message(FATAL_ERROR "The front end, which compiles kernels to PTX, failed (${status}):\n${problem}")
  endif()
  set(ptx_folder "${CMAKE_CURRENT_BINARY_DIR}/ptx")
  add_custom_command(
    OUTPUT "${ptx_folder}/done"
    COMMAND ${prebuild} "${ptx_folder}"
    COMMAND ${CMAKE_COMMAND} -E touch "${ptx_folder}/done"
    DEPENDS ${kernels} ${kernel_headers} ${frontend}
    COMMENT "Compiling every kernel to PTX")
  add_custom_target(mlx_mittens_ptx ALL DEPENDS "${ptx_folder}/done")
  install(DIRECTORY "${ptx_folder}/" DESTINATION mlx_mittens/ptx FILES_MATCHING PATTERN "*.ptx")
endif()
