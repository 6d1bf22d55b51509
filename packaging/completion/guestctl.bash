# Completion of guestctl for bash: guestctl itself knows what can come next.
_guestctl() {
    local line=${COMP_LINE:0:COMP_POINT} part current prefix candidate
    local -a words=() found=()
    # What bash has split at : and = is put together again, up to the cursor.
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
    mapfile -t found < <("$1" __complete -- "${words[@]}" 2> /dev/null)
    # Only what comes after the last of these is replaced.
    prefix=${current%"${current##*[:=]}"}
    COMPREPLY=()
    for candidate in "${found[@]}"; do
        candidate=${candidate%%$'\t'*}
        # It may be a name that a guest has given a file: the shell must not take it for more than a word.
        printf -v candidate %q "${candidate#"$prefix"}"
        COMPREPLY+=("$candidate")
    done
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[/:=] ]]; then
        compopt -o nospace
    fi
}
complete -F _guestctl guestctl
