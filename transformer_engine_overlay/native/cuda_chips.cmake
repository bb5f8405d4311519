# SPDX-License-Identifier: Apache-2.0
#
# Which chips the CUDA backend is compiled for.

# The PTX of 90 (no suffix: both machine code and PTX) serves newer chips that the list lacks.
set(TE_OVERLAY_DEFAULT_CHIPS 75-real 80-real 86-real 89-real 90 100-real 120-real)

# te_overlay_cuda_chips(NVCC REQUESTED OUT)
#
# Sets OUT to the list for CMAKE_CUDA_ARCHITECTURES: what REQUESTED names, separated by spaces,
# commas or semicolons, or the default list less the chips that NVCC does not know.
function(te_overlay_cuda_chips nvcc requested out)
  execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE listing RESULT_VARIABLE status
                  ERROR_VARIABLE errors)
  string(REGEX MATCHALL "compute_[0-9]+" known "${listing}")
  string(REPLACE "compute_" "" known "${known}")
  if(NOT status EQUAL 0 OR NOT known)
    message(FATAL_ERROR "'${nvcc} --list-gpu-arch' names no chips: ${errors}")
  endif()
  list(JOIN known " " known_text)

  string(REGEX REPLACE "[ ,\t]+" ";" wanted "${requested}")
  list(REMOVE_ITEM wanted "")
  if(NOT wanted)
    set(wanted ${TE_OVERLAY_DEFAULT_CHIPS})
    set(is_default TRUE)
  endif()

  set(chips "")
  set(left_out "")
  foreach(chip IN LISTS wanted)
    if(NOT chip MATCHES "^([0-9]+)[af]?(-real|-virtual)?$")
      message(FATAL_ERROR "TE_OVERLAY_CUDA_ARCHS: '${chip}' is not a chip. Write its number, with "
                          "-real or -virtual if need be, for example \"90\" or \"80-real;90\".")
    elseif(CMAKE_MATCH_1 IN_LIST known)
      list(APPEND chips "${chip}")
    elseif(is_default)
      list(APPEND left_out "${chip}")
    else()
      message(FATAL_ERROR "TE_OVERLAY_CUDA_ARCHS: this nvcc does not know the chip '${chip}'. "
                          "${nvcc} knows ${known_text}.")
    endif()
  endforeach()
  if(left_out)
    list(JOIN left_out " " left_out)
    message(STATUS "Chips that this nvcc does not know, left out: ${left_out}")
  endif()
  list(REMOVE_DUPLICATES chips)
  list(JOIN chips " " chips_text)
  message(STATUS "CUDA chips: ${chips_text}")
  set(${out} "${chips}" PARENT_SCOPE)
endfunction()
