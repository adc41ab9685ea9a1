# An extension with the nanobind of one folder. nanobind's own CMake functions serve one nanobind a project, and releases
# of mlx need several.

# Drops debugging symbols and code that nothing reaches from a release build.
function(mittens_strip target)
  set(release $<OR:$<CONFIG:Release>,$<CONFIG:MinSizeRel>>)
  if(APPLE)
    target_link_options(${target} PRIVATE $<${release}:-Wl,-dead_strip -Wl,-x -Wl,-S>)
  else()
    target_link_options(${target} PRIVATE $<${release}:-Wl,-s> -Wl,--gc-sections)
  endif()
endfunction()

function(mittens_add_extension target nanobind)
  set(includes "${nanobind}/include" ${Python_INCLUDE_DIRS})
  set(optimized $<OR:$<CONFIG:Release>,$<CONFIG:MinSizeRel>>)
  # Objects of different releases share no file, so that a stack protector and sections cost none but their own.
  set(options $<${optimized}:-fno-stack-protector>)
  if(NOT APPLE)
    list(APPEND options -ffunction-sections -fdata-sections)
  endif()

  add_library(nanobind_${target} OBJECT "${nanobind}/src/nb_combined.cpp")
  target_include_directories(nanobind_${target} PRIVATE ${includes} "${nanobind}/ext/robin_map/include")
  target_compile_definitions(nanobind_${target} PRIVATE NB_BUILD NB_DOMAIN=mlx $<$<NOT:$<CONFIG:Debug>>:NB_COMPACT_ASSERTIONS>)
  # nanobind reads Python's objects through other types than their own.
  target_compile_options(nanobind_${target} PRIVATE -fno-strict-aliasing ${options})

  add_library(${target} MODULE ${ARGN})
  target_include_directories(${target} PRIVATE ${includes})
  target_compile_definitions(${target} PRIVATE NB_DOMAIN=mlx)
  target_compile_options(${target} PRIVATE ${options})
  target_link_libraries(${target} PRIVATE nanobind_${target})
  if(APPLE)
    target_link_options(${target} PRIVATE "-Wl,@${nanobind}/cmake/darwin-ld-cpython.sym")
  endif()
  mittens_strip(${target})
  if(DEFINED SKBUILD_SOABI)
    set(soabi "${SKBUILD_SOABI}")
  else()
    set(soabi "${Python_SOABI}")
  endif()
  set_target_properties(
    ${target} PROPERTIES PREFIX "" OUTPUT_NAME _ext SUFFIX ".${soabi}${CMAKE_SHARED_MODULE_SUFFIX}")
endfunction()

# Writes the types of an extension to _ext.pyi, and installs it: `site` is the folder that holds its mlx.
function(mittens_add_stub target nanobind site)
  set(stub "${CMAKE_CURRENT_BINARY_DIR}/_ext.pyi")
  add_custom_command(
    OUTPUT "${stub}"
    COMMAND ${CMAKE_COMMAND} -E env --modify "PYTHONPATH=path_list_prepend:${site}"
            "${Python_EXECUTABLE}" "${nanobind}/stubgen.py" -q -i "$<TARGET_FILE_DIR:${target}>" -m _ext -o "${stub}"
    DEPENDS ${target} "${nanobind}/stubgen.py"
    COMMENT "Writing the extension's types")
  add_custom_target(${target}_stub ALL DEPENDS "${stub}")
  install(FILES "${stub}" DESTINATION mlx_mittens)
endfunction()
