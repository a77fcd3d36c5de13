# The version that flexops/_version.py states. Before 1.0 a minor version may take away what an earlier one had, as a major one may later.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../_version.py" flexops_line REGEX "^__version__ = ")
string(REGEX REPLACE "^__version__ = \"([0-9.]+).*" "\\1" PACKAGE_VERSION "${flexops_line}")
string(REGEX MATCH "^(0\\.[0-9]+|[0-9]+)" flexops_line "${PACKAGE_VERSION}")

set(PACKAGE_VERSION_COMPATIBLE FALSE)
if(NOT PACKAGE_FIND_VERSION OR ("${PACKAGE_FIND_VERSION}." MATCHES "^${flexops_line}\\." AND NOT PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION))
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
