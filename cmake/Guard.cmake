# Finds MLX and nanobind in the build's Python and refuses two that cannot work together: nanobind objects pass between
# extensions only where the tag of its internals is the same, and a mismatch would build, import, and fail at every call.
function(mittens_guard version_out mlx_dir_out nanobind_dir_out)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/guard.py"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE message ERROR_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${message}")
  endif()
  list(GET found 0 version)
  list(GET found 1 mlx_dir)
  list(GET found 2 nanobind_dir)
  message(STATUS "MLX ${version}: ${mlx_dir}")
  set(${version_out} "${version}" PARENT_SCOPE)
  set(${mlx_dir_out} "${mlx_dir}" PARENT_SCOPE)
  set(${nanobind_dir_out} "${nanobind_dir}" PARENT_SCOPE)
endfunction()
