# Finds MLX and nanobind for each release that is asked for, and refuses two that cannot work together: nanobind objects
# pass between extensions only where the tag of its internals is the same, and a mismatch would build, import, and fail
# at every call. The result is a list of VERSION;MLX;NANOBIND for each release, newest last. Without releases it is the
# mlx of the build's Python.
function(mittens_guard found_out releases folder)
  set(arguments "")
  if(releases)
    set(arguments --releases ${releases} --folder "${folder}")
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/guard.py" ${arguments}
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE message ERROR_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${message}")
  endif()
  string(REPLACE "\n" ";" found "${found}")
  set(${found_out} "${found}" PARENT_SCOPE)
endfunction()
