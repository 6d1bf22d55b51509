# Completion of guestctl for bash: guestctl itself knows what can come next.
_guestctl() {
    local line=${COMP_LINE:0:COMP_POINT} part current prefix candidate home
    local -a words=() found=()
    # What bash has split, such as at : and =, is put together again, up to the cursor.
    for part in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
        if [[ ${#words[@]} -eq 0 || $line == [[:space:]]* ]]; then
            words+=("")
            line=${line#"${line%%[![:space:]]*}"}
        fi
        [[ $line == "$part"* ]] || part=$line
        words[-1]+=$part
        line=${line#"$part"}
    done
    words=("${words[@]//\\/}")
    current=${words[-1]}
    mapfile -t found < <(command guestctl __complete -- "${words[@]}" 2> /dev/null)
    # Only what comes after the last place where bash splits is replaced.
    prefix=${current%"${current##*["$COMP_WORDBREAKS"]}"}
    COMPREPLY=()
    for candidate in "${found[@]}"; do
        candidate=${candidate%%$'\t'*}
        candidate=${candidate#"$prefix"}
        # Others have chosen the names: the shell must not take one for more than a word. A home directory stays one.
        home=
        if [[ $candidate == '~/'* ]]; then
            home='~/'
            candidate=${candidate#'~/'}
        fi
        [[ -z $candidate ]] || printf -v candidate %q "$candidate"
        COMPREPLY+=("$home$candidate")
    done
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[/:=] ]]; then
        compopt -o nospace
    fi
}
complete -F _guestctl guestctl
