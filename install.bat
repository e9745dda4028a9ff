@echo off
rem Sets Tandem up in .venv beside this file, the first time and when the requirements change, and starts it.
rem
rem   install.bat                      the web app
rem   install.bat generate "PROMPT"    any sub-command of app.py, with any arguments
rem   install.bat test [PYTEST ARGS]   the tests that take a few minutes, with the tools they need
rem   install.bat test --all           all tests: slow ones, in a browser and on a GPU too
rem
rem All this script does is find a Python from 3.10 to 3.13; tools\setup_env.py does the rest.
rem TANDEM_PYTHON names the Python to use. Nothing outside this folder is changed.
setlocal EnableExtensions DisableDelayedExpansion

set "HELPER=%~dp0tools\setup_env.py"
set "OWN=%~dp0.venv\Scripts\python.exe"
set "PROBE=import sys, ensurepip, venv; sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 13) and sys.maxsize > 2**32))"
set "PY="

if defined TANDEM_PYTHON goto named
if exist "%~dp0.venv\tandem-install.json" call :try_own
for %%V in (3.11 3.12 3.13 3.10) do if not defined PY call :search py -%%V
if not defined PY call :search python
if not defined PY call :search python3
if defined PY goto start
echo Tandem setup: no 64-bit Python 3.10 to 3.13 was found 1>&2
echo Tandem setup: install Python 3.11 from https://www.python.org/downloads/windows/ and run the same command again 1>&2
set "CODE=2"
goto end

:named
rem The value may be in quotes.
set "NAMED=%TANDEM_PYTHON:"=%"
call :try_named
if defined PY goto start
echo Tandem setup: TANDEM_PYTHON is no 64-bit Python 3.10 to 3.13 that runs: "%NAMED%" 1>&2
echo Tandem setup: set it to one, or unset it to search for one 1>&2
set "CODE=2"
goto end

:start
rem How messages name this script, so that their commands can be pasted. In quotes, because folders may have "&" and "(".
set "TANDEM_PROGRAM=%~0"
%PY% -I -S "%HELPER%" %*
set "CODE=%ERRORLEVEL%"

:end
rem Started by a double click, the window would close on what went wrong.
if not "%CODE%"=="0" if "%~1"=="" pause
exit /b %CODE%

rem Paths are not passed to labels as arguments: "call" would drop "%" and double "^" in them.
:try_own
"%OWN%" -I -c "%PROBE%" >nul 2>nul
if "%ERRORLEVEL%"=="0" set PY="%OWN%"
exit /b 0

:try_named
"%NAMED%" -I -c "%PROBE%" >nul 2>nul
if "%ERRORLEVEL%"=="0" set PY="%NAMED%"
exit /b 0

rem "call", because pyenv's python is a batch file, which would not return.
:search
call %* -I -c "%PROBE%" >nul 2>nul
if "%ERRORLEVEL%"=="0" set PY=%*
exit /b 0
